"use strict";
// Connects the parts once the page is there.

startChat();
startTraining();
startServer();
for (const name of TABS) at("tab-" + name).addEventListener("click", () => show(name));
at("key").addEventListener("change", () => {
  loadModels();
  refresh();
});
loadModels();
setInterval(loadModels, 5000);
setInterval(refresh, 2000);
