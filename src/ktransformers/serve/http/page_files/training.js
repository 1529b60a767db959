"use strict";
// Trainings below the server's folders: the newest first, its curves while it runs.

const PANELS = [
  ["loss", ["loss", "eval_loss"]],
  ["learning rate", ["lr"]],
  ["gradient norm", ["grad_norm"]],
  ["tokens/s", ["throughput"]],
];
let runs = [],
  followed = null,
  next = 0,
  logged = [];

function age(seconds) {
  if (seconds < 90) return "now";
  if (seconds < 5400) return Math.round(seconds / 60) + " min ago";
  return seconds < 172800 ? Math.round(seconds / 3600) + " h ago" : Math.round(seconds / 86400) + " days ago";
}

function runText(run) {
  const steps = run.steps ? `step ${run.step} of ${run.steps}` : "nothing logged yet";
  return `${run.name}: ${steps}, ${age(Date.now() / 1000 - run.changed)}`;
}

async function findRuns() {
  const reply = await accepted(await fetch("/training/runs", { headers: headers() }));
  runs = (await reply.json()).runs;
  const picker = at("runs"),
    before = picker.value;
  picker.replaceChildren(...runs.map((run) => element("option", { value: run.name, textContent: runText(run) })));
  if (runs.some((run) => run.name === before)) picker.value = before;
  picker.hidden = !runs.length;
}

async function followTraining() {
  try {
    await findRuns();
    const chosen = at("runs").value;
    if (!runs.length) {
      at("training-state").textContent =
        "No training was found below the server's folder. kt train writes one; kt serve --watch DIR names one.";
      return;
    }
    if (chosen !== followed) [followed, next, logged] = [chosen, 0, []];
    const after = next;
    const reply = await accepted(
      await fetch("/training?after=" + after + "&run=" + encodeURIComponent(chosen), { headers: headers() }),
    );
    const found = await reply.json();
    if (chosen !== followed || after !== next) return; // another request, sent before this reply, brought the lines
    if (found.next < next) logged = [];
    const more = found.next !== next || !at("curves").childNodes.length;
    next = found.next;
    logged.push(...found.lines.filter((line) => Number.isFinite(Number(line.current_steps))));
    drawState(found.directory);
    if (more) drawCurves();
  } catch (error) {
    at("training-state").textContent = error.message;
  }
}

function drawState(directory) {
  const last = logged[logged.length - 1];
  if (!last) {
    at("training-state").textContent = directory + ": nothing logged yet";
    return;
  }
  const total = last.total_steps ? " of " + last.total_steps : "";
  const ended = last.total_steps && last.current_steps >= last.total_steps;
  const time = !ended && last.remaining_time ? ", " + last.remaining_time + " left" : "";
  at("training-state").textContent = `${directory}: step ${last.current_steps}${total}${time}`;
}

function drawCurves() {
  const curve = (field) => ({
    name: field.replace("_", " "),
    points: logged
      .filter((line) => line[field] !== undefined && line[field] !== null)
      .map((line) => [Number(line.current_steps), Number(line[field])]),
  });
  at("curves").replaceChildren(...PANELS.map(([title, fields]) => lineChart(title, fields.map(curve))));
}

function startTraining() {
  at("runs").addEventListener("change", followTraining);
}
