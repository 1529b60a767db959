"use strict";
// What the server is doing, from /metrics, and its adapters: loaded and unloaded here.

const MAX_SAMPLES = 150;
const samples = []; // {time, values}, the oldest first

// Metric, or metric{label="x"} -> number.
function parseMetrics(text) {
  const values = {};
  for (const line of text.split("\n")) {
    const space = line.lastIndexOf(" ");
    if (line && line[0] !== "#" && space > 0) values[line.slice(0, space)] = Number(line.slice(space + 1));
  }
  return values;
}

// Rates per second between neighbouring samples of a counter: [[seconds before now, rate], ...].
function rates(list, name) {
  const made = [],
    now = list[list.length - 1].time;
  for (let index = 1; index < list.length; index++) {
    const [before, after] = [list[index - 1], list[index]],
      seconds = (after.time - before.time) / 1000;
    const more = after.values[name] - before.values[name];
    if (seconds > 0 && more >= 0) made.push([(after.time - now) / 1000, more / seconds]);
  }
  return made;
}

function memoryRows(values) {
  const rows = [];
  const add = (name, value, limit, text) => {
    if (Number.isFinite(value) && limit > 0) rows.push({ name, value, limit, text });
  };
  const of = (value, limit) => `${bytes(value)} of ${bytes(limit)}`;
  const total = values.kt_host_memory_bytes,
    used = total - values.kt_host_memory_available_bytes;
  add("this process", values.process_resident_memory_bytes, total, of(values.process_resident_memory_bytes, total));
  add("host, all", used, total, of(used, total));
  for (const name of Object.keys(values)) {
    const gpu = /^kt_gpu_memory_bytes\{gpu="(\d+)"\}$/.exec(name)?.[1];
    if (gpu === undefined) continue;
    const taken = values[name] - values[`kt_gpu_memory_free_bytes{gpu="${gpu}"}`];
    add("GPU " + gpu, taken, values[name], of(taken, values[name]));
  }
  const [cached, limit] = [values.kt_cache_tokens, values.kt_cache_limit_tokens];
  add("KV cache", cached, limit, `${cached} of ${limit} tokens, ${values.kt_cache_busy_tokens} in use`);
  return rows;
}

async function readMetrics() {
  try {
    const reply = await accepted(await fetch("/metrics", { headers: headers() }));
    const values = parseMetrics(await reply.text());
    samples.push({ time: performance.now(), values });
    samples.splice(0, samples.length - MAX_SAMPLES);
    drawMetrics();
  } catch (error) {
    at("server-state").textContent = error.message;
  }
}

function drawMetrics() {
  const { values } = samples[samples.length - 1];
  const first = values.kt_first_token_seconds_count
    ? values.kt_first_token_seconds_sum / values.kt_first_token_seconds_count
    : null;
  at("server-state").textContent =
    `${values.kt_running_sequences} answers under way, ${values.kt_waiting_sequences} waiting, ` +
    `${values.kt_new_tokens_total} tokens generated` +
    (first === null ? "" : `, first token after ${first.toFixed(2)} s on average`);
  const speed = [
    ["generated", "kt_new_tokens_total"],
    ["prompts", "kt_prompt_tokens_total"],
  ].map(([name, metric]) => ({ name, points: rates(samples, metric) }));
  at("metrics").replaceChildren(
    lineChart("tokens/s, by seconds before now", speed, { fromZero: true }),
    bars(memoryRows(values)),
  );
}

async function findAdapters() {
  try {
    await findRuns();
    const found = runs.filter((run) => run.adapter);
    at("found-adapters").replaceChildren(
      ...found.map((run) => element("option", { value: run.adapter, label: run.name })),
    );
  } catch (error) {
    at("adapter-state").textContent = error.message;
  }
}

function drawAdapters() {
  const base = models[0]?.id ?? "";
  at("adapters").replaceChildren(
    ...models
      .filter((model) => model.parent)
      .map((model) => {
        const drop = element("button", { type: "button", textContent: "Unload" });
        drop.addEventListener("click", () =>
          changeAdapter("/v1/unload_lora_adapter", { lora_name: model.id.slice(base.length + 1) }),
        );
        return element(
          "li",
          {},
          element("strong", { textContent: model.id }),
          " ",
          element("span", { textContent: model.root }),
          " ",
          drop,
        );
      }),
  );
}

async function changeAdapter(path, body) {
  at("adapter-state").textContent = "…";
  at("load").disabled = true;
  try {
    const reply = await accepted(await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body) }));
    at("adapter-state").textContent = (await reply.json()).message;
    await loadModels();
  } catch (error) {
    at("adapter-state").textContent = error.message;
  }
  at("load").disabled = false;
}

function adapterName(path) {
  return (path.replace(/\/+$/, "").split("/").pop() || "adapter").replace(/[^\w.-]+/g, "-");
}

function startServer() {
  at("load-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const path = at("adapter-path").value.trim();
    if (!path) return;
    changeAdapter("/v1/load_lora_adapter", {
      lora_name: at("adapter-name").value.trim() || adapterName(path),
      lora_path: path,
    });
  });
}
