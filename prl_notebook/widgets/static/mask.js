// The attention mask of a packed layout on a canvas: zoom, pan, and a read-out of the (query, key) pair pointed at.
// The mask is drawn from its rules, row by row of what is visible, so the cost depends on the canvas and not on the
// number of tokens. Rows of the layout lie along one diagonal, each as wide as the layout.

const MARGIN = 30; // strips with the position ids, in CSS pixels
const COLOURS = { prompt: "--blue", again: "--red", even: "--orange", odd: "--green" }; // of the style sheet

// Per flat token: number of its block (-1: padding), of its response in the block (-1: prompt), and its position id.
export function index(layout) {
  const size = layout.rows * layout.width;
  const block = new Int32Array(size).fill(-1);
  const response = new Int32Array(size).fill(-1);
  const position = new Int32Array(size);
  const seen = new Set();
  const blocks = layout.blocks.map((b, number) => {
    const offset = b.row * layout.width;
    const start = offset + b.start;
    for (let i = 0; i < b.prompt; i++) {
      block[start + i] = number;
      position[start + i] = i;
    }
    const responses = b.responses.map((r, n) => {
      for (let i = 0; i < r.length; i++) {
        const at = offset + r.start + i;
        [block[at], response[at], position[at]] = [number, n, b.prompt + i];
      }
      return { ...r, start: offset + r.start };
    });
    const again = seen.has(b.group);
    seen.add(b.group);
    return { group: b.group, start, prompt: b.prompt, responses, again };
  });
  return { size, width: layout.width, rows: layout.rows, texts: layout.texts, blocks, block, response, position };
}

// May query q attend to key k, and why (or why not)?
export function attends(ix, q, k) {
  if (ix.block[q] < 0 || ix.block[k] < 0) return [false, "padding"];
  if (Math.floor(q / ix.width) !== Math.floor(k / ix.width)) return [false, "another row"];
  if (ix.block[q] !== ix.block[k]) return [false, "another group"];
  if (k > q) return [false, "the key comes later"];
  if (ix.response[k] < 0) return [true, ix.response[q] < 0 ? "same prompt, not later" : "the completion's own prompt"];
  if (ix.response[k] === ix.response[q]) return [true, "same completion, not later"];
  return [false, "another completion of the same prompt"];
}

export function describe(ix, i) {
  if (ix.block[i] < 0) return `token ${i} (padding)`;
  const b = ix.blocks[ix.block[i]];
  const part = ix.response[i] < 0 ? "prompt" : `completion ${b.responses[ix.response[i]].completion}`;
  const text = ix.texts[Math.floor(i / ix.width)][i % ix.width];
  return `token ${i} ${JSON.stringify(text)} (group ${b.group}, ${part}, position ${ix.position[i]})`;
}

class Picture {
  constructor(title, layout, readout) {
    this.ix = index(layout);
    this.readout = readout;
    this.home();
    this.el = document.createElement("div");
    this.el.className = "prl-mask-picture";
    const heading = document.createElement("h4");
    heading.textContent = `${title}: ${this.ix.size.toLocaleString("en")} tokens` + (this.ix.rows > 1 ? ` in ${this.ix.rows} rows` : "");
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("aria-label", `${title}: attention mask, arrow keys move the read-out`);
    const bar = document.createElement("div");
    for (const [label, act] of [["+", () => this.zoom(1.6)], ["−", () => this.zoom(1 / 1.6)], ["whole mask", () => this.home()]]) {
      const button = document.createElement("button");
      button.textContent = label;
      button.onclick = () => { act(); this.draw(); };
      bar.append(button);
    }
    this.el.append(heading, this.canvas, bar);
    this.listen();
  }

  home() { // x, y: first visible key and query; span: visible tokens along each side
    [this.x, this.y, this.span] = [0, 0, this.ix.size];
  }

  zoom(factor, fx = 0.5, fy = 0.5) {
    const span = Math.min(this.ix.size, Math.max(8, this.span / factor));
    this.x += (this.span - span) * fx;
    this.y += (this.span - span) * fy;
    this.span = span;
    this.clamp();
  }

  clamp() {
    const most = this.ix.size - this.span;
    this.x = Math.min(Math.max(0, this.x), most);
    this.y = Math.min(Math.max(0, this.y), most);
  }

  listen() {
    const c = this.canvas;
    const fraction = (e) => {
      const box = c.getBoundingClientRect();
      return [(e.clientX - box.left - MARGIN) / (box.width - MARGIN), (e.clientY - box.top - MARGIN) / (box.height - MARGIN)];
    };
    let drag = null;
    c.onpointerdown = (e) => { drag = [...fraction(e), this.x, this.y]; c.setPointerCapture(e.pointerId); };
    c.onpointerup = () => { drag = null; };
    c.onpointermove = (e) => {
      const [fx, fy] = fraction(e);
      if (drag) {
        [this.x, this.y] = [drag[2] - (fx - drag[0]) * this.span, drag[3] - (fy - drag[1]) * this.span];
        this.clamp();
      }
      this.point(Math.floor(this.y + fy * this.span), Math.floor(this.x + fx * this.span));
    };
    c.onpointerleave = () => this.point(-1, -1);
    c.ondblclick = (e) => { this.zoom(2.5, ...fraction(e)); this.draw(); };
    c.onwheel = (e) => { // the page keeps scrolling unless the picture was clicked
      if (document.activeElement !== c && !e.ctrlKey) return;
      e.preventDefault();
      this.zoom(e.deltaY < 0 ? 1.25 : 0.8, ...fraction(e));
      this.draw();
    };
    c.onkeydown = (e) => {
      const [dq, dk] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[e.key] ?? [0, 0];
      if (!dq && !dk) return;
      e.preventDefault();
      e.stopPropagation();
      this.point(Math.max(0, (this.q ?? 0) + dq), Math.max(0, (this.k ?? 0) + dk));
    };
  }

  point(q, k) {
    const { size } = this.ix;
    const inside = q >= 0 && k >= 0 && q < size && k < size;
    [this.q, this.k] = inside ? [q, k] : [undefined, undefined];
    if (inside) {
      const [allowed, why] = attends(this.ix, q, k);
      this.readout.style.color = "var(--fg)";
      this.readout.textContent = `query: ${describe(this.ix, q)}\nkey: ${describe(this.ix, k)}\n${allowed ? "✓ may attend" : "✗ may not attend"}: ${why}`;
    }
    this.draw();
  }

  draw() {
    this.frame ??= requestAnimationFrame(() => { this.frame = undefined; this.paint(); });
  }

  paint() {
    const side = this.canvas.clientWidth, dpr = window.devicePixelRatio || 1;
    if (!side) return;
    if (this.canvas.width !== Math.round(side * dpr)) this.canvas.width = this.canvas.height = Math.round(side * dpr);
    const g = this.canvas.getContext("2d"), ix = this.ix, cell = (side - MARGIN) / this.span;
    const style = getComputedStyle(this.canvas), foreground = style.color;
    const colour = Object.fromEntries(Object.entries(COLOURS).map(([part, name]) => [part, style.getPropertyValue(name)]));
    g.setTransform(dpr, 0, 0, dpr, 0, 0);
    g.clearRect(0, 0, side, side);
    const px = (k) => MARGIN + (k - this.x) * cell, py = (q) => MARGIN + (q - this.y) * cell;
    g.save();
    g.beginPath();
    g.rect(MARGIN, MARGIN, side, side);
    g.clip();
    const step = Math.max(1, 1 / cell); // tokens per painted line
    for (let at = this.y; at < this.y + this.span; at += step) {
      const q = Math.floor(at);
      if (q >= ix.size || ix.block[q] < 0) continue;
      const b = ix.blocks[ix.block[q]], r = b.responses[ix.response[q]];
      const line = (from, to, colour, alpha) => {
        g.globalAlpha = alpha;
        g.fillStyle = colour;
        const top = Math.round(py(step > 1 ? at : q)); // whole pixels, or neighbours overlap in a seam
        g.fillRect(px(from), top, (to - from) * cell, Math.max(1, Math.round(py(q + 1)) - top));
      };
      const own = r && (r.completion % 2 ? colour.odd : colour.even);
      line(b.start, Math.min(q + 1, b.start + b.prompt), r ? own : b.again ? colour.again : colour.prompt, r ? 0.35 : 0.75);
      if (r) line(r.start, q + 1, own, 0.85);
      if (step === 1) at = q; // start of the cell, so that every token is painted once
    }
    this.labels(g, px, py, cell, foreground, style.getPropertyValue("--bg"));
    if (this.q !== undefined) {
      g.globalAlpha = 0.25;
      g.fillStyle = foreground;
      g.fillRect(px(this.k), MARGIN, Math.max(1, cell), side);
      g.fillRect(MARGIN, py(this.q), side, Math.max(1, cell));
    }
    g.restore();
    this.positions(g, px, py, cell, side, foreground);
  }

  labels(g, px, py, cell, foreground, background) {
    g.globalAlpha = 1;
    [g.fillStyle, g.strokeStyle, g.lineWidth, g.lineJoin] = [foreground, background, 3, "round"];
    g.font = "11px sans-serif";
    const label = (text, start, length) => {
      if (length * cell <= 9 * text.length) return;
      g.strokeText(text, px(start) + 3, py(start + length) - 4); // a halo, or it is hard to read on its tile
      g.fillText(text, px(start) + 3, py(start + length) - 4);
    };
    for (const b of this.ix.blocks) {
      label(b.again ? "again" : `prompt ${b.group}`, b.start, b.prompt);
      for (const r of b.responses) label(`r${r.completion}`, r.start, r.length);
    }
  }

  // Position ids along both edges as a height, as numbers where there is room.
  positions(g, px, py, cell, side, foreground) {
    const { position, block, size } = this.ix;
    const top = Math.max(1, position.reduce((a, b) => Math.max(a, b), 0));
    g.fillStyle = foreground;
    g.font = "10px sans-serif";
    const step = Math.max(1, 1 / cell);
    for (let i = Math.floor(this.x); i < Math.min(size, this.x + this.span); i += step) {
      const t = Math.floor(i), height = 2 + (MARGIN - 8) * position[t] / top;
      g.globalAlpha = block[t] < 0 ? 0 : 0.4;
      if (px(t) >= MARGIN) g.fillRect(px(t), MARGIN - 3 - height, Math.max(1, cell - 1), height);
      if (cell > 22 && px(t) >= MARGIN) { g.globalAlpha = 1; g.fillText(position[t], px(t) + 2, 10); }
    }
    for (let i = Math.floor(this.y); i < Math.min(size, this.y + this.span); i += step) {
      const t = Math.floor(i), width = 2 + (MARGIN - 8) * position[t] / top;
      g.globalAlpha = block[t] < 0 ? 0 : 0.4;
      if (py(t) >= MARGIN) g.fillRect(MARGIN - 3 - width, py(t), width, Math.max(1, cell - 1));
      if (cell > 22 && py(t) >= MARGIN) { g.globalAlpha = 1; g.fillText(position[t], 2, py(t) + cell / 2 + 4); }
    }
    g.globalAlpha = 0.4;
    g.strokeStyle = foreground;
    g.strokeRect(MARGIN - 0.5, MARGIN - 0.5, side - MARGIN, side - MARGIN);
    g.globalAlpha = 1;
  }
}

function render({ model, el }) {
  const data = model.get("data");
  const root = document.createElement("div");
  root.className = "prl prl-mask";
  const readout = document.createElement("div");
  readout.className = "readout";
  readout.textContent = "Point at a pair: down are queries, right are keys.\nDrag to move; double-click, +, or the wheel after a click to zoom; arrow keys step.\nThe bars at the edges show position ids.";
  const pictures = document.createElement("div");
  pictures.className = "prl-mask-pictures";
  const shown = [["Shared prompts", data.shared], ["Separate rows", data.separate]].map(([title, layout]) =>
    new Picture(title + (layout.kind === data.kind ? " (this micro-step)" : ""), layout, readout));
  pictures.append(...shown.map((p) => p.el));
  const facts = document.createElement("div");
  facts.innerHTML = data.facts; // rendered and escaped by views
  root.append(readout, pictures, facts);
  el.append(root);
  const resize = new ResizeObserver(() => shown.forEach((p) => p.draw()));
  resize.observe(root);
  const theme = new MutationObserver(() => shown.forEach((p) => p.draw()));
  theme.observe(document.body, { attributes: true });
  return () => { resize.disconnect(); theme.disconnect(); };
}

export default { render };
