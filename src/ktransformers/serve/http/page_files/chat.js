"use strict";
// One prompt, an answer in each column: the base, an adapter, as many as are wanted.

const MAX_COLUMNS = 6;
const columns = []; // {model, messages, running, parts of the DOM}
// Field -> what the server calls it. An empty field is not sent, so that the server's default holds.
const SAMPLING = {
  temperature: "temperature",
  "top-p": "top_p",
  "top-k": "top_k",
  "min-p": "min_p",
  repetition: "repetition_penalty",
  presence: "presence_penalty",
  frequency: "frequency_penalty",
  tokens: "max_tokens",
  seed: "seed",
};
const INTEGERS = new Set(["top_k", "max_tokens", "seed"]);

function sampling() {
  const made = {};
  for (const [id, name] of Object.entries(SAMPLING)) {
    const text = at(id).value.trim();
    if (text === "" || !Number.isFinite(Number(text))) continue;
    made[name] = INTEGERS.has(name) ? Math.trunc(Number(text)) : Number(text);
  }
  return made;
}

function addColumn(model) {
  const column = { messages: [], running: null };
  column.picker = element("select", { ariaLabel: "model of this column" });
  column.speed = element("div", { className: "speed" });
  column.again = element("button", {
    type: "button",
    textContent: "Retry",
    disabled: true,
    title: "Answer the last prompt again",
  });
  column.close = element("button", {
    type: "button",
    textContent: "×",
    ariaLabel: "remove this column",
    title: "Remove this column",
  });
  column.talk = element("div", { className: "talk", ariaLive: "polite" });
  const bar = element("div", { className: "bar" }, column.picker, column.again, column.close);
  column.section = element("section", {}, bar, column.talk, column.speed);
  column.picker.addEventListener("change", () => clear(column));
  column.again.addEventListener("click", () => (column.running ? column.running.abort() : retry(column)));
  column.close.addEventListener("click", () => removeColumn(column));
  columns.push(column);
  at("columns").append(column.section);
  fillPicker(column, model);
  columnsChanged();
}

function removeColumn(column) {
  column.running?.abort();
  columns.splice(columns.indexOf(column), 1);
  column.section.remove();
  columnsChanged();
}

function columnsChanged() {
  at("add").disabled = columns.length >= MAX_COLUMNS;
  for (const column of columns) column.close.disabled = columns.length < 2;
}

function fillPicker(column, chosen) {
  column.picker.replaceChildren(
    ...models.map((model) => element("option", { value: model.id, textContent: model.id })),
  );
  const wanted = chosen ?? models[0]?.id;
  if (models.some((model) => model.id === wanted)) column.picker.value = wanted;
  else if (models.length) {
    column.picker.value = models[0].id;
    clear(column);
  }
}

function modelsChanged() {
  if (!columns.length) {
    for (const model of models.slice(0, 2)) addColumn(model.id);
    drawAdapters();
    return;
  }
  for (const column of columns) fillPicker(column, column.picker.value);
  // The first adapter that appears gets a column of its own beside a lonely base.
  if (columns.length === 1 && models.length > 1 && !columns[0].messages.length) addColumn(models[1].id);
  drawAdapters();
}

function clear(column) {
  column.running?.abort();
  column.messages.length = 0;
  column.talk.replaceChildren();
  column.speed.textContent = "";
  column.again.disabled = true;
}

function say(column, kind, text) {
  const line = element("div", { className: kind, textContent: text });
  column.talk.append(line);
  line.scrollIntoView?.({ block: "end" });
  return line;
}

// A block above an answer that shows what the model thinks.
function addThinking(line) {
  const text = element("div");
  line.before(element("details", { className: "thinking" }, element("summary", { textContent: "Thinking" }), text));
  return text;
}

// Draws an answer at most once in a frame, however fast tokens come.
function painter(line, talk) {
  let text = "",
    waiting = false;
  const paint = () => {
    waiting = false;
    const follows = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 80;
    line.replaceChildren(...nodes(markdown(text)));
    if (follows) talk.scrollTop = talk.scrollHeight;
  };
  return {
    add(more) {
      text += more;
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(paint);
    },
    finish() {
      paint();
      return text;
    },
  };
}

function setRunning(column, controller) {
  column.running = controller;
  column.again.textContent = controller ? "Stop" : "Retry";
  column.again.disabled = !controller && !column.messages.length;
  at("send").textContent = columns.some((one) => one.running) ? "Stop" : "Send";
}

// Answers the messages of a column. A stopped answer stays as far as it came; one that failed is not remembered.
async function answer(column) {
  const first = at("system").value ? [{ role: "system", content: at("system").value }] : [];
  const body = { model: column.picker.value, messages: first.concat(column.messages), stream: true };
  Object.assign(body, { stream_options: { include_usage: true } }, sampling());
  const line = say(column, "assistant", ""),
    painted = painter(line, column.talk),
    controller = new AbortController();
  const started = performance.now(),
    asked = column.messages[column.messages.length - 1];
  let begun = 0,
    tokens = 0,
    thinking = null,
    failure = null;
  setRunning(column, controller);
  column.speed.textContent = "";
  try {
    const request = { method: "POST", headers: headers(), body: JSON.stringify(body), signal: controller.signal };
    const reply = await accepted(await fetch("/v1/chat/completions", request));
    for await (const part of events(reply)) {
      if (part.error) throw new Error(part.error.message);
      if (part.usage) tokens = part.usage.completion_tokens;
      for (const choice of part.choices) {
        const thought = choice.delta.reasoning_content;
        if (!thought && !choice.delta.content) continue;
        begun = begun || performance.now();
        if (thought) {
          thinking = thinking || addThinking(line);
          thinking.textContent += thought;
        } else painted.add(choice.delta.content);
      }
    }
  } catch (error) {
    failure = error;
  }
  const text = painted.finish(),
    seconds = (performance.now() - (begun || started)) / 1000;
  if (columns.includes(column) && column.messages.includes(asked)) {
    // not cleared or removed meanwhile
    if (failure && failure.name !== "AbortError") say(column, "error", failure.message);
    if (text) column.messages.push({ role: "assistant", content: text });
    const rate = tokens > 1 ? ", " + ((tokens - 1) / seconds).toFixed(1) + " tokens/s" : "";
    column.speed.textContent = failure ? (failure.name === "AbortError" ? "stopped" : "") : tokens + " tokens" + rate;
  }
  setRunning(column, null);
}

async function retry(column) {
  while (column.messages.length && column.messages[column.messages.length - 1].role === "assistant")
    column.messages.pop();
  while (column.talk.lastChild && column.talk.lastChild.className !== "user") column.talk.lastChild.remove();
  if (column.messages.length) await answer(column);
}

async function send() {
  if (columns.some((column) => column.running)) {
    for (const column of columns) column.running?.abort();
    return;
  }
  const text = at("prompt").value.trim();
  if (!text || !models.length) return;
  at("prompt").value = "";
  await Promise.all(
    columns.map((column) => {
      // A prompt without an answer, which was stopped or has failed, is not sent again beside the new one.
      if (column.messages[column.messages.length - 1]?.role === "user") column.messages.pop();
      column.messages.push({ role: "user", content: text });
      say(column, "user", text);
      return answer(column);
    }),
  );
}

function startChat() {
  at("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  at("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      at("ask").requestSubmit();
    }
  });
  at("clear").addEventListener("click", () => columns.forEach(clear));
  at("retry").addEventListener("click", () => columns.filter((column) => !column.running).forEach(retry));
  at("add").addEventListener("click", () => {
    const shown = new Set(columns.map((column) => column.picker.value));
    addColumn((models.find((model) => !shown.has(model.id)) ?? models[0])?.id);
  });
}
