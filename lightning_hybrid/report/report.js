"use strict";
// Hover, sort, filter, toggle; the page is complete without any of it.
const all = (selector, root = document) => [...root.querySelectorAll(selector)];

// A tooltip of our own: titles, which work without this script, become data-tip.
const tip = document.createElement("div");
tip.id = "tip";
tip.hidden = true;
document.body.append(tip);
for (const title of all("svg title")) {
  title.parentNode.dataset.tip = title.textContent;
  title.remove();
}
document.addEventListener("pointermove", (event) => {
  const target = event.target.closest("[data-tip]");
  tip.hidden = !target;
  if (!target) return;
  tip.textContent = target.dataset.tip;
  const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 18 + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${below ? event.clientY + 18 : event.clientY - tip.offsetHeight - 12}px`;
});
document.addEventListener("pointerleave", () => { tip.hidden = true; });

// The boxes of one micro-batch, wherever they are.
for (const figure of all("figure.timeline")) {
  figure.addEventListener("pointerover", (event) => {
    const number = event.target.dataset.m;
    figure.classList.toggle("picked", number !== undefined);
    for (const box of all("[data-m]", figure)) box.classList.toggle("lit", box.dataset.m === number);
  });
  figure.addEventListener("pointerleave", () => figure.classList.remove("picked"));
  for (const button of all(".legend button", figure)) {
    button.addEventListener("click", () => {
      const off = button.classList.toggle("off");
      for (const box of all(`svg .${button.dataset.k}`, figure)) box.classList.toggle("off", off);
    });
  }
}

// The table of runs.
const table = document.getElementById("runs");
if (table) {
  const body = table.tBodies[0];
  all("thead th", table).forEach((head, column) => head.firstChild.addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") === "descending";
    for (const other of all("thead th", table)) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = (row) => row.cells[column].dataset.v ?? row.cells[column].textContent;
    const numeric = head.classList.contains("num");
    const order = (a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === "" || y === "") return (x === "") - (y === ""); // what was not measured comes last
      return (up ? 1 : -1) * (numeric ? x - y : x.localeCompare(y, "en", { numeric: true }));
    };
    body.append(...[...body.rows].sort(order));
  }));
  const input = document.getElementById("filter");
  const buttons = all(".filters button");
  const apply = () => {
    const words = input.value.toLowerCase().split(/\s+/);
    const on = new Set(buttons.filter((b) => b.getAttribute("aria-pressed") === "true").map((b) => b.dataset.status));
    let shown = 0;
    for (const row of body.rows) {
      const text = `${row.textContent} ${row.dataset.text}`.toLowerCase();
      row.hidden = !on.has(row.dataset.status) || !words.every((word) => text.includes(word));
      shown += !row.hidden;
    }
    document.getElementById("shown").textContent = shown < body.rows.length ? `${shown} of ${body.rows.length}` : "";
  };
  input.addEventListener("input", apply);
  for (const button of buttons) {
    button.addEventListener("click", () => {
      button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") !== "true");
      apply();
    });
  }
}

// A link to a run opens it.
const open = () => {
  const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target && target.tagName === "DETAILS") {
    target.open = true;
    target.scrollIntoView();
  }
};
addEventListener("hashchange", open);
open();

const root = document.documentElement;
document.getElementById("theme")?.addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
document.getElementById("print")?.addEventListener("click", () => print());
