"use strict";
// Requests to the server, with the API key where one is given, and the tabs.

const at = (id) => document.getElementById(id);
let models = []; // what is served, the base first: {id, root, parent}

function headers() {
  const made = { "Content-Type": "application/json" };
  if (at("key").value) made.Authorization = "Bearer " + at("key").value;
  return made;
}

async function refused(reply) {
  try {
    return (await reply.json()).error.message;
  } catch {
    return "the server answered " + reply.status;
  }
}

async function accepted(reply) {
  if (!reply.ok) throw new Error(await refused(reply));
  return reply;
}

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// The events of a stream of server-sent events.
async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    const lines = held.split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:") || line.includes("[DONE]")) continue;
      yield JSON.parse(line.slice(5));
    }
  }
}

async function loadModels() {
  try {
    const reply = await accepted(await fetch("/v1/models", { headers: headers() }));
    const fresh = (await reply.json()).data.map((model) => ({ id: model.id, root: model.root, parent: model.parent }));
    at("notice").textContent = "";
    if (JSON.stringify(fresh) === JSON.stringify(models)) return;
    models = fresh;
    modelsChanged();
  } catch (error) {
    at("notice").textContent = error.message;
  }
}

const TABS = ["chat", "training", "server"];

function show(name) {
  for (const one of TABS) {
    at(one).hidden = one !== name;
    at("tab-" + one).setAttribute("aria-selected", String(one === name));
  }
  refresh();
}

// What the visible tab shows, again.
function refresh() {
  if (!at("training").hidden) return followTraining();
  if (!at("server").hidden) return Promise.all([readMetrics(), findAdapters()]);
  return Promise.resolve();
}
