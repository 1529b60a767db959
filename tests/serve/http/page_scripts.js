// Runs a function of the page's scripts for test_page_scripts.py:
// node page_scripts.js FUNCTION SCRIPT... < arguments.json
// The document is a stand-in that records which elements are made; what it makes is printed as JSON.
"use strict";
const fs = require("fs");
const vm = require("vm");

class Node {
  constructor(tag, text) {
    Object.assign(this, { tag, text, attributes: {}, children: [] });
  }
  append(...more) {
    this.children.push(...more.map((one) => (one instanceof Node ? one : new Node("#text", String(one)))));
  }
  setAttribute(name, value) {
    this.attributes[name] = String(value);
  }
  addEventListener() {}
  set textContent(text) {
    this.children = [new Node("#text", String(text))];
  }
  set href(value) {
    this.attributes.href = value;
  }
  set target(value) {
    this.attributes.target = value;
  }
  set rel(value) {
    this.attributes.rel = value;
  }
  toJSON() {
    return this.tag === "#text" ? this.text : { tag: this.tag, attributes: this.attributes, children: this.children };
  }
}

const document = {
  createElement: (tag) => new Node(tag),
  createElementNS: (_, tag) => new Node(tag),
  createTextNode: (text) => new Node("#text", text),
};
const context = vm.createContext({ document, console, navigator: {} });
for (const file of process.argv.slice(3)) vm.runInContext(fs.readFileSync(file, "utf-8"), context);
const given = JSON.parse(fs.readFileSync(0, "utf-8"));
context.given = given;
const began = process.hrtime.bigint();
const made = vm.runInContext(`(${process.argv[2]})(...given)`, context, { timeout: 20000 });
const seconds = Number(process.hrtime.bigint() - began) / 1e9;
process.stdout.write(JSON.stringify({ made, seconds }));
