"use strict";
// Markdown of an answer as a tree: a string is text, an array is [tag, attributes, ...children] with a tag of TAGS.
// An answer is untrusted: no HTML is parsed, nothing becomes markup except these tags, links go to http, https and
// mailto only, and images become links, so that no answer makes the page load anything. Every search for a closing mark
// that fails is not repeated, so the time is linear in the length.

const TAGS = new Set([
  "p",
  "br",
  "strong",
  "em",
  "del",
  "code",
  "pre",
  "a",
  "ul",
  "ol",
  "li",
  "blockquote",
  "hr",
  "table",
  "thead",
  "tbody",
  "tr",
  "th",
  "td",
  "h1",
  "h2",
  "h3",
  "h4",
  "h5",
  "h6",
  "div",
]);
const MAX_DEPTH = 8; // of lists and quotes inside of each other
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])[ \t]+(.*)$/;
const SAFE_LINK = /^(https?:\/\/|mailto:)/i;
const MAX_LINK = 2048; // letters of a link's text, and of its target: no more are searched

function isRule(line) {
  const bare = line.replace(/\s+/g, "");
  return bare.length >= 3 && /^(-+|\*+|_+)$/.test(bare);
}

function indentOf(line) {
  return line.length - line.trimStart().length;
}

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || ITEM.test(line) || isRule(line) || /^ {0,3}>/.test(line);
}

function markdown(text) {
  return blocks(text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n"), 0);
}

function blocks(lines, depth) {
  const made = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    let block, fence, heading;
    if (!line.trim()) {
      at++;
      continue;
    }
    if ((fence = FENCE.exec(line))) [block, at] = fenced(lines, at, fence);
    else if ((heading = HEADING.exec(line))) {
      block = ["h" + heading[1].length, {}, ...inline(heading[2].trim())];
      at++;
    } else if (isRule(line)) {
      block = ["hr", {}];
      at++;
    } else if (/^ {0,3}>/.test(line) && depth < MAX_DEPTH) [block, at] = quote(lines, at, depth);
    else if (ITEM.test(line) && depth < MAX_DEPTH) [block, at] = list(lines, at, depth);
    else if (isTable(lines, at)) [block, at] = table(lines, at);
    else [block, at] = paragraph(lines, at);
    made.push(block);
  }
  return made;
}

function fenced(lines, at, fence) {
  const mark = fence[1],
    code = [];
  for (at++; at < lines.length; at++) {
    const bare = lines[at].trim();
    if (bare.startsWith(mark) && bare === mark[0].repeat(bare.length)) {
      at++;
      break;
    }
    code.push(lines[at]);
  }
  return [["pre", { language: fence[2].trim().slice(0, 60) }, ["code", {}, code.join("\n")]], at];
}

function quote(lines, at, depth) {
  const inner = [];
  while (at < lines.length && /^ {0,3}>/.test(lines[at])) inner.push(lines[at++].replace(/^ {0,3}> ?/, ""));
  return [["blockquote", {}, ...blocks(inner, depth + 1)], at];
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]),
    ordered = /\d/.test(first[2]),
    level = first[1].length,
    items = [];
  while (at < lines.length) {
    const found = ITEM.exec(lines[at]);
    if (!found || found[1].length < level || found[1].length > level + 3 || /\d/.test(found[2]) !== ordered) break;
    const inside = found[1].length + found[2].length + 1,
      own = [found[3]];
    for (at++; at < lines.length; at++) {
      const line = lines[at],
        blank = !line.trim();
      if (blank && !(at + 1 < lines.length && indentOf(lines[at + 1]) >= 2 && lines[at + 1].trim())) break;
      if (!blank && indentOf(line) < Math.min(inside, level + 2) && startsBlock(line)) break;
      if (!blank && indentOf(line) <= level && !lines[at - 1].trim()) break;
      own.push(blank ? "" : line.slice(Math.min(indentOf(line), inside)));
    }
    items.push(["li", {}, ...tight(blocks(own, depth + 1))]);
    while (at < lines.length && !lines[at].trim() && at + 1 < lines.length && ITEM.test(lines[at + 1])) at++;
  }
  return [[ordered ? "ol" : "ul", ordered ? { start: String(parseInt(first[2], 10)) } : {}, ...items], at];
}

function tight(children) {
  // The first paragraph of an item stands without space around it.
  return children.length && children[0][0] === "p" ? [...children[0].slice(2), ...children.slice(1)] : children;
}

function cells(line) {
  return line
    .trim()
    .replace(/^\|/, "")
    .replace(/\|$/, "")
    .split("|")
    .map((cell) => inline(cell.trim()));
}

function isTable(lines, at) {
  if (!lines[at].includes("|") || at + 1 >= lines.length) return false;
  const under = lines[at + 1];
  return under.includes("-") && under.includes("|") && /^[\s|:-]+$/.test(under);
}

function table(lines, at) {
  const head = cells(lines[at]).map((cell) => ["th", {}, ...cell]),
    rows = [];
  for (at += 2; at < lines.length && lines[at].includes("|") && lines[at].trim(); at++) {
    rows.push(["tr", {}, ...cells(lines[at]).map((cell) => ["td", {}, ...cell])]);
  }
  return [["table", {}, ["thead", {}, ["tr", {}, ...head]], ["tbody", {}, ...rows]], at];
}

function paragraph(lines, at) {
  const own = [lines[at++].trim()];
  while (at < lines.length && lines[at].trim() && !startsBlock(lines[at])) own.push(lines[at++].trim());
  return [["p", {}, ...own.flatMap((line, index) => (index ? [["br", {}], ...inline(line)] : inline(line)))], at];
}

const MARKS = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];
const isWord = (letter) => letter !== undefined && /[\p{L}\p{N}]/u.test(letter);

function inline(text, level = 0) {
  const made = [],
    dead = new Set();
  let plain = "",
    at = 0;
  const push = (node) => {
    if (plain) made.push(plain);
    plain = "";
    made.push(node);
  };
  while (at < text.length) {
    const found = inlineAt(text, at, dead, level);
    if (found) {
      push(found[0]);
      at = found[1];
    } else if (text[at] === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else plain += text[at++];
  }
  if (plain) made.push(plain);
  return made;
}

// [node, next position] of what begins at this position, or null.
function inlineAt(text, at, dead, level) {
  const letter = text[at];
  if (letter === "`") return codeAt(text, at, dead);
  if (letter === "[" || (letter === "!" && text[at + 1] === "[")) return linkAt(text, at, level);
  if (letter === "h" && !isWord(text[at - 1])) return bareLinkAt(text, at);
  if (!"*_~".includes(letter) || level >= MAX_DEPTH) return null;
  for (const [mark, tag] of MARKS) {
    if (!text.startsWith(mark, at) || dead.has(mark)) continue;
    const from = at + mark.length;
    if (from >= text.length || text[from] === " " || (mark[0] === "_" && isWord(text[at - 1]))) continue;
    const end = closing(text, mark, from);
    if (end < 0) {
      dead.add(mark);
      continue;
    }
    return [[tag, {}, ...inline(text.slice(from, end), level + 1)], end + mark.length];
  }
  return null;
}

function closing(text, mark, from) {
  for (let end = text.indexOf(mark, from + 1); end >= 0; end = text.indexOf(mark, end + 1)) {
    const after = text[end + mark.length];
    if (text[end - 1] === " " || (mark[0] === "_" && isWord(after))) continue;
    if (mark.length === 1 && (after === mark || text[end - 1] === mark)) continue;
    return end;
  }
  return -1;
}

function codeAt(text, at, dead) {
  let length = 1;
  while (text[at + length] === "`") length++;
  const mark = "`".repeat(length);
  if (dead.has(mark)) return null;
  for (let end = text.indexOf(mark, at + length); end >= 0; end = text.indexOf(mark, end + 1)) {
    if (text[end + length] === "`" || text[end - 1] === "`") continue;
    return [["code", {}, text.slice(at + length, end).replace(/^ (.+) $/, "$1")], end + length];
  }
  dead.add(mark);
  return null;
}

function linkAt(text, at, level) {
  const from = text[at] === "!" ? at + 2 : at + 1;
  const near = text.slice(from, from + MAX_LINK),
    middle = near.indexOf("](");
  if (middle < 0 || near.slice(0, middle).includes("[") || level >= MAX_DEPTH) return null;
  const begin = from + middle + 2,
    inside = text.slice(begin, begin + MAX_LINK),
    end = inside.indexOf(")"),
    target = end < 0 ? "" : inside.slice(0, end).trim().split(/\s/, 1)[0];
  if (!SAFE_LINK.test(target)) return null;
  return [["a", { href: target }, ...inline(near.slice(0, middle) || target, MAX_DEPTH)], begin + end + 1];
}

function bareLinkAt(text, at) {
  const found = /^https?:\/\/[^\s<>"'`]+/i.exec(text.slice(at, at + 2048));
  if (!found) return null;
  const target = found[0].replace(/[.,;:!?)\]*_]+$/, "");
  return target.length > 8 ? [["a", { href: target }, target], at + target.length] : null;
}

// DOM nodes of a tree. `attributes` that matter are set one by one; no attribute comes from an answer by its name.
function nodes(tree) {
  return tree.map((node) => {
    if (typeof node === "string") return document.createTextNode(node);
    const [tag, attributes, ...children] = node;
    if (!TAGS.has(tag)) throw new Error("a tag that answers do not have: " + tag);
    const made = document.createElement(tag);
    if (tag === "a") {
      made.href = attributes.href;
      made.target = "_blank";
      made.rel = "noopener noreferrer nofollow";
    }
    if (tag === "ol" && attributes.start !== "1") made.setAttribute("start", attributes.start);
    made.append(...nodes(children));
    return tag === "pre" ? codeBlock(made, attributes.language) : made;
  });
}

function codeBlock(pre, language) {
  const bar = document.createElement("div"),
    name = document.createElement("span"),
    copy = document.createElement("button");
  bar.className = "code-bar";
  name.textContent = language || "code";
  copy.type = "button";
  copy.textContent = "Copy";
  copy.addEventListener("click", () => {
    navigator.clipboard?.writeText(pre.textContent).then(() => {
      copy.textContent = "Copied";
    });
  });
  bar.append(name, copy);
  const block = document.createElement("div");
  block.className = "code-block";
  block.append(bar, pre);
  return block;
}
