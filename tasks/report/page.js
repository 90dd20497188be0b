// Tables sort by a click on a heading: numbers largest first, texts from a to z; again for the other way round.
"use strict";
for (const table of document.querySelectorAll("table")) {
  const headings = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  const original = [...body.rows];
  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const numeric = heading.classList.contains("number");
      const first = numeric ? "descending" : "ascending";
      const second = numeric ? "ascending" : "descending";
      const direction = heading.getAttribute("aria-sort") === first ? second : first;
      const sign = direction === "ascending" ? 1 : -1;
      const order = (row) => row.cells[column].dataset.order;
      const compare = numeric
        ? (a, b) => Number(order(a)) - Number(order(b))
        : (a, b) => order(a).localeCompare(order(b), "en", { numeric: true });
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", direction);
      body.append(...[...original].sort((a, b) => sign * compare(a, b)));
    });
  });
}
