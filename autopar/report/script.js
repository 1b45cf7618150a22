"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");

  function show(text, x, y) {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 4));
    const above = y + 18 + box.height > innerHeight;
    tip.style.left = `${left}px`;
    tip.style.top = `${above ? Math.max(4, y - box.height - 10) : y + 18}px`;
  }
  function hide() { tip.hidden = true; }

  // anything with data-t says it where the pointer is
  document.addEventListener("pointermove", (event) => {
    const target = event.target instanceof Element ? event.target.closest("[data-t]") : null;
    if (target) show(target.dataset.t, event.clientX, event.clientY);
    else if (!(event.target instanceof Element && event.target.closest("[data-plot]"))) hide();
  });
  document.addEventListener("pointerdown", (event) => {
    const target = event.target instanceof Element ? event.target.closest("[data-t]") : null;
    if (target) show(target.dataset.t, event.clientX, event.clientY);
  });
  document.addEventListener("scroll", hide, { passive: true });

  function seconds(s) {
    if (s >= 1) return `${s.toPrecision(3)} s`;
    return s >= 1e-3 ? `${(s * 1e3).toPrecision(3)} ms` : `${(s * 1e6).toPrecision(3)} µs`;
  }

  // a plot's rows: under the pointer, the one that `find` picks by plot units, said by `say`
  function watch(name, find, say, mark) {
    const area = document.querySelector(`[data-plot="${name}"]`);
    if (!area) return;
    const at = (event) => {
      const box = area.getBoundingClientRect();
      const row = find((event.clientX - box.left) / box.width * 1000, (event.clientY - box.top) / box.height * 1000, box);
      if (mark) {
        mark.hidden = !row;
        if (row) { area.append(mark); mark.style.left = `${row[0] / 10}%`; mark.style.top = `${row[1] / 10}%`; }
      }
      if (row) show(say(row), event.clientX, event.clientY); else hide();
    };
    area.addEventListener("pointermove", at);
    area.addEventListener("pointerdown", at);
    area.addEventListener("pointerleave", () => { hide(); if (mark) mark.hidden = true; });
  }

  if (data.candidates) {
    const { rows, schedules } = data.candidates;
    const mark = document.createElement("div");
    mark.id = "mark"; mark.hidden = true;
    const hidden = new Set();
    watch("candidates", (x, y, box) => {
      let best = null, least = 24 * 24;
      for (const row of rows) {
        if (hidden.has(row[4] ? "exact" : "screened")) continue;
        const dx = (row[0] - x) * box.width / 1000, dy = (row[1] - y) * box.height / 1000;
        const far = dx * dx + dy * dy - (row[4] ? 9 : 0);
        if (far < least) { least = far; best = row; }
      }
      return best;
    }, (row) => {
      const [, , s, gb, exact, pp, tp, context, shard, copies, zero, mb, count, virtual, devices, schedule] = row;
      const words = data.candidates.fewer ? [`${devices} devices`] : [];
      if (pp > 1) words.push(`pipeline ${pp} (${schedules[schedule]}${virtual > 1 ? `, ${virtual} stages a rank` : ""})`);
      if (tp > 1) words.push(`tensor ${tp}`);
      if (context > 1) words.push(`context ${context}${shard * copies > 1 ? "" : `, ZeRO ${zero}`}`);
      if (shard * copies > 1) words.push(`data ${shard * copies}, ZeRO ${zero}${copies > 1 && zero ? ` in shards of ${shard}` : ""}`);
      words.push(`micro-batch ${mb} × ${count}`);
      return `${words.join(" · ")}\n${exact ? "" : "at least "}${seconds(s)}, ${gb} GB${exact ? " (priced as it would run)" : ""}`;
    }, mark);
    for (const button of document.querySelectorAll("button[data-shows]")) {
      button.addEventListener("click", () => {
        const on = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(on));
        const layer = document.querySelector(`[data-layer="${button.dataset.shows}"]`);
        if (layer) layer.style.display = on ? "" : "none";
        if (on) hidden.delete(button.dataset.shows); else hidden.add(button.dataset.shows);
      });
    }
  }

  if (data.timeline) {
    const { rows, ranks, kinds } = data.timeline;
    watch("timeline", (x, y) => {
      const rank = Math.floor(y / 1000 * ranks);
      return rows.find((row) => row[0] === rank && row[4] <= x && x <= row[5]);
    }, (row) => `rank ${row[0]}, stage ${row[2]}, micro-batch ${row[3]}\n${kinds[row[1]]}: ${seconds(row[6])} to ${seconds(row[7])} (${seconds(row[7] - row[6])})`);
  }

  // a drawing that is wider than the screen begins with its middle
  for (const graph of document.querySelectorAll("svg.graph")) {
    const box = graph.parentElement;
    box.scrollLeft = (box.scrollWidth - box.clientWidth) / 2.4;
  }

  // tables are sorted by a click on a column's name; data-v is what counts
  for (const table of document.querySelectorAll("table[data-sortable]")) {
    [...table.tHead.rows[0].cells].forEach((cell, column) => {
      const button = cell.querySelector("button");
      if (!button) return;
      button.addEventListener("click", () => {
        const up = cell.getAttribute("aria-sort") !== "ascending";
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        cell.setAttribute("aria-sort", up ? "ascending" : "descending");
        const value = (row) => row.cells[column].dataset.v ?? row.cells[column].textContent;
        const order = (a, b) => {
          const [x, y] = [value(a), value(b)];
          const [p, q] = [Number(x), Number(y)];
          return x !== "" && y !== "" && !Number.isNaN(p) && !Number.isNaN(q) ? p - q : String(x).localeCompare(String(y));
        };
        const sorted = [...table.tBodies[0].rows].sort((a, b) => (up ? 1 : -1) * order(a, b));
        table.tBodies[0].append(...sorted);
      });
    });
  }
})();
