/* Conversations. Each is a tree of messages: writing one anew adds a branch beside it, and `leaf` ends the one shown.
   They stay in this browser, each under a key of its own, so that two tabs do not disturb each other. */
const CHAT = "numflow.chat.", LAST = "numflow.last";

class Talk {
  constructor(kept = {}) {
    this.id = kept.id || ""; this.title = kept.title || ""; this.time = kept.time || 0;
    this.nodes = kept.nodes || (kept.turns || []).map((turn, at) => ({ ...turn, id: at + 1, parent: at }));
    this.leaf = kept.leaf ?? this.nodes.length;
  }
  static read(id) {
    try {
      const kept = JSON.parse(localStorage.getItem(CHAT + id));
      return Array.isArray(kept?.nodes || kept?.turns) ? new Talk({ ...kept, id }) : null;
    } catch { return null; }
  }
  static all() {
    try {
      return Object.keys(localStorage).filter(key => key.startsWith(CHAT)).map(key => Talk.read(key.slice(CHAT.length)))
        .filter(Boolean).sort((a, b) => b.time - a.time);
    } catch { return []; }
  }
  /* The messages that are shown, the first one first. */
  get branch() {
    const found = [], byId = new Map(this.nodes.map(node => [node.id, node]));
    for (let node = byId.get(this.leaf); node && found.length <= this.nodes.length; node = byId.get(node.parent)) found.unshift(node);
    return found;
  }
  get name() {
    const first = this.nodes[0];
    return this.title || first?.content?.split("\n")[0].slice(0, 80) || first?.files?.[0]?.name || "…";
  }
  /* Add a message below `parent`, and go there. */
  add(message, parent = this.leaf) {
    const node = { ...message, id: 1 + Math.max(0, ...this.nodes.map(other => other.id)), parent };
    this.nodes.push(node); this.leaf = node.id;
    return node;
  }
  /* A message and those that stand in its place in other branches. */
  versions(node) { return this.nodes.filter(other => other.parent === node.parent && other.role === node.role); }
  /* Show the branch of a message, down to its newest end. */
  show(node) {
    for (let child = node; child; child = this.nodes.filter(other => other.parent === this.leaf).pop()) this.leaf = child.id;
  }
  /* Keep it. Returns why that was not possible, "" if it was. */
  keep() {
    if (!this.nodes.length) return "";
    if (!this.id || (Talk.read(this.id)?.time ?? 0) !== this.time) // another tab has gone on with it
      this.id = Date.now().toString(36) + Math.random().toString(36).slice(2, 6);
    const nodes = this.nodes.map(({ id, parent, role, content, thinking, how, files, model }) => ({ id, parent, role, content, thinking, how, files, model }));
    const before = this.time;
    this.time = Date.now();
    try {
      localStorage.setItem(CHAT + this.id, JSON.stringify({ title: this.title, time: this.time, leaf: this.leaf, nodes }));
      return "";
    } catch {
      this.time = before;
      return "The browser's storage is full or off: this conversation is not kept. Export or delete some.";
    }
  }
  forget() { try { localStorage.removeItem(CHAT + this.id); } catch { /* gone already */ } }
  /* As `numflow chat` loads it, with the branch that is shown. */
  exported(system) {
    const messages = this.branch.map(node => ({ role: node.role, content: whole(node) }));
    if (system.trim()) messages.unshift({ role: "system", content: system });
    return JSON.stringify({ messages }, null, 1) + "\n";
  }
}

/* A message with its files below it, each in a fence that its text does not close. */
function whole({ content, files }) {
  return [content, ...(files || []).map(({ name, text }) => {
    const fence = "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map(m => m[0].length + 1)));
    return `${name}:\n${fence}\n${text}\n${fence}`;
  })].filter(Boolean).join("\n\n");
}

/* The conversation that was last looked at, in this tab or in any. */
function remember(id) { for (const where of ["sessionStorage", "localStorage"]) try { window[where].setItem(LAST, id); } catch { /* storage is off */ } }
function recall() {
  for (const where of ["sessionStorage", "localStorage"]) try { const id = window[where].getItem(LAST); if (id !== null) return id; } catch { /* storage is off */ }
  return "";
}
