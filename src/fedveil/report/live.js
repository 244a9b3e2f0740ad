"use strict";
(() => {
  const NS = "http://www.w3.org/2000/svg";
  const [HEIGHT, LEFT, TOP, BOTTOM] = [270, 56, 16, 226];

  function make(parent, name, attributes, text) {
    const node = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  }

  function nice(value) {
    if (value === 0) return "0";
    return Math.abs(value) >= 1000 || Math.abs(value) < 0.01 ? value.toExponential(0) : String(Number(value.toPrecision(3)));
  }

  function draw(id, points, rounds, label, limit) {
    const box = document.getElementById(id);
    box.replaceChildren();
    if (!points.length) {
      const note = document.createElement("p");
      note.className = "note";
      note.textContent = "Nothing to show yet.";
      box.append(note);
      return;
    }
    const WIDTH = Math.max(300, Math.min(880, box.clientWidth)); // letters keep their size on a phone
    const svg = make(box, "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
    svg.setAttribute("aria-label", `${label}: ${nice(points.at(-1)[1])} after round ${points.at(-1)[0]}`);
    const step = (about) => {
      const power = 10 ** Math.floor(Math.log10(about));
      return [1, 2, 2.5, 5, 10].map((part) => part * power).find((part) => part >= about * 0.999999);
    };
    const highest = Math.max(...points.map((point) => point[1]), limit ?? -Infinity);
    const lowest = Math.min(0, ...points.map((point) => point[1]));
    const top = lowest + 4 * step(highest === lowest ? 0.25 : (highest - lowest) / 4);
    const x = (round) => LEFT + (round / Math.max(1, rounds)) * (WIDTH - LEFT - 12);
    const y = (value) => BOTTOM - ((value - lowest) / (top - lowest)) * (BOTTOM - TOP);
    for (let i = 0; i <= 4; i++) {
      const value = lowest + (i / 4) * (top - lowest);
      make(svg, "path", { class: "grid", d: `M${LEFT} ${y(value)}H${WIDTH - 12}` });
      make(svg, "text", { class: "tick", x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, nice(value));
      const round = Math.round((i / 4) * rounds);
      make(svg, "text", { class: "tick", x: x(round), y: BOTTOM + 18, "text-anchor": "middle" }, String(round));
    }
    if (limit !== null && limit !== undefined) {
      make(svg, "path", { class: "audit", d: `M${LEFT} ${y(limit)}H${WIDTH - 12}`, "stroke-dasharray": "6 4" });
      make(svg, "text", { class: "name", x: WIDTH - 14, y: y(limit) + 14, "text-anchor": "end" }, `budget ${nice(limit)}`);
    }
    const path = points.map((point, i) => `${i ? "L" : "M"}${x(point[0]).toFixed(1)} ${y(point[1]).toFixed(1)}`);
    make(svg, "path", { class: "line s0", d: path.join("") });
    const last = points.at(-1);
    make(svg, "circle", { class: "f0", cx: x(last[0]), cy: y(last[1]), r: 4 });
    make(svg, "text", { class: "axis", x: WIDTH / 2, y: HEIGHT - 2, "text-anchor": "middle" }, "round");
  }

  function time(seconds) {
    if (seconds < 90) return `${Math.round(seconds)} s`;
    if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
    return `${(seconds / 3600).toFixed(1)} h`;
  }

  function show({ run, rounds, finished, measure }) {
    if (!run) return;
    document.getElementById("title").textContent = run.title;
    const values = (key, factor = 1) =>
      rounds.filter((line) => typeof line[key] === "number").map((line) => [line.round, factor * line[key]]);
    const score = values(measure.key, measure.factor);
    const epsilon = values("epsilon");
    document.getElementById("measure").textContent = measure.axis[0].toUpperCase() + measure.axis.slice(1);
    draw("score", score, run.rounds, measure.axis);
    draw("epsilon", epsilon, run.rounds, "proven epsilon", run.budget);
    draw("loss", values("loss"), run.rounds, "test loss");
    const done = rounds.length ? rounds.at(-1).round : 0;
    const parts = [`${done} of ${run.rounds} rounds.`];
    if (score.length) {
      const last = score.at(-1)[1];
      parts.push(`${measure.title} ${measure.factor === 100 ? `${last.toFixed(2)} %` : nice(last)}.`);
    }
    if (epsilon.length) {
      const spent = epsilon.at(-1)[1];
      const of = run.budget === null ? "" : ` of ${nice(run.budget)}, ${Math.round((100 * spent) / run.budget)} % of the budget`;
      parts.push(`Epsilon ${nice(spent)}${of}.`);
    }
    const recent = rounds.slice(-10).map((line) => line.seconds).filter((value) => typeof value === "number");
    if (finished) parts.push("Finished.");
    else if (recent.length) {
      const mean = recent.reduce((a, b) => a + b, 0) / recent.length;
      parts.push(`About ${time(mean * (run.rounds - done))} left.`);
    }
    const status = document.getElementById("status");
    if (status.textContent !== parts.join(" ")) status.textContent = parts.join(" ");
  }

  async function look() {
    try {
      const answer = await fetch("rounds", { cache: "no-store" });
      show(await answer.json());
    } catch {
      document.getElementById("status").textContent = "The run has ended, or its page is closed.";
      return;
    }
    setTimeout(look, 1000);
  }
  look();
})();
