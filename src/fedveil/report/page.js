"use strict";
(() => {
  const tip = document.querySelector(".tip");

  function sortBy(head) {
    const table = head.closest("table");
    const body = table.tBodies[0];
    const place = head.cellIndex;
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = (row) => {
      const cell = row.cells[place];
      const value = cell.dataset.value;
      if (value !== undefined) return value === "inf" ? Infinity : Number(value);
      return cell.classList.contains("num") ? null : cell.textContent;
    };
    const keyed = Array.from(body.rows, (row) => [key(row), row]);
    keyed.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null);
      const order = typeof a === "number" && typeof b === "number"
        ? (a === b ? 0 : a - b)
        : String(a).localeCompare(String(b), undefined, { numeric: true });
      return down ? -order : order;
    });
    for (const [, row] of keyed) body.append(row);
  }

  for (const head of document.querySelectorAll("table.sortable th[aria-sort]")) {
    head.querySelector("button").addEventListener("click", () => sortBy(head));
  }

  function nearest(values, wanted) {
    let best = 0;
    for (let i = 1; i < values.length; i++) {
      if (Math.abs(values[i] - wanted) < Math.abs(values[best] - wanted)) best = i;
    }
    return best;
  }

  function line(text, strong) {
    const node = document.createElement(strong ? "strong" : "div");
    node.textContent = text;
    return node;
  }

  function readable(chart) {
    const data = JSON.parse(chart.dataset.chart);
    const longest = data.series.reduce((a, b) => (b.x.length > a.x.length ? b : a));
    let at = longest.x.length - 1;

    function show(svg, x, clientX, clientY) {
      const hover = svg.querySelector(".hover");
      const { left, right, low, high } = Object.fromEntries(
        Object.entries(hover.dataset).map(([name, text]) => [name, Number(text)]),
      );
      const place = left + ((x - low) / (high - low)) * (right - left);
      const guide = hover.querySelector(".guide");
      guide.setAttribute("x1", place);
      guide.setAttribute("x2", place);
      guide.style.visibility = "visible";
      const shown = [line(`${data.x} ${Number(x.toPrecision(4))}`, true)];
      for (const series of data.series) {
        const i = nearest(series.x, x);
        const band = series.low.length ? ` (${series.low[i].toFixed(2)} to ${series.high[i].toFixed(2)})` : "";
        shown.push(line(`${series.name}: ${series.y[i].toFixed(2)}${data.unit}${band}`));
      }
      tip.replaceChildren(...shown);
      tip.hidden = false;
      const box = svg.getBoundingClientRect();
      const anchor = clientX ?? box.left + (place / svg.viewBox.baseVal.width) * box.width;
      const wide = tip.offsetWidth;
      tip.style.left = `${Math.max(8, Math.min(anchor + 14, window.innerWidth - wide - 8))}px`;
      tip.style.top = `${Math.max(8, (clientY ?? box.top + 40) - tip.offsetHeight - 12)}px`;
    }

    for (const svg of chart.querySelectorAll("svg")) {
      const hide = () => {
        tip.hidden = true;
        svg.querySelector(".guide").style.visibility = "hidden";
      };
      svg.addEventListener("pointermove", (event) => {
        const box = svg.getBoundingClientRect();
        const inside = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
        const { left, right, low, high } = svg.querySelector(".hover").dataset;
        const wanted = Number(low) + ((inside - left) / (right - left)) * (high - low);
        at = nearest(longest.x, wanted);
        show(svg, longest.x[at], event.clientX, event.clientY);
      });
      svg.addEventListener("pointerleave", hide);
      svg.addEventListener("blur", hide);
      svg.addEventListener("keydown", (event) => {
        const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (event.key === "Escape") hide();
        if (!step) return;
        event.preventDefault();
        at = Math.max(0, Math.min(longest.x.length - 1, at + step));
        show(svg, longest.x[at]);
      });
    }
  }

  for (const chart of document.querySelectorAll("[data-chart]")) readable(chart);
})();
