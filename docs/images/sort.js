// Tables within `.sortable` are sorted by the column whose heading is clicked, first the largest; a second click turns the order.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll(".sortable table")) {
    const body = table.tBodies[0];
    const headings = [...table.tHead.rows[0].cells];
    const value = (row, column) => {
      const text = row.cells[column].textContent.trim().replace("−", "-");
      const number = parseFloat(text);
      return Number.isNaN(number) ? text : number;
    };
    const compare = (a, b) => {
      if (typeof a === typeof b) return typeof a === "number" ? b - a : a.localeCompare(b);
      return typeof a === "number" ? -1 : 1; // numbers first, what has none after them
    };
    headings.forEach((heading, column) => {
      heading.tabIndex = 0;
      heading.title = "sort by this column";
      const sort = () => {
        const turned = heading.ariaSort === "descending";
        const rows = [...body.rows].sort((a, b) => compare(value(a, column), value(b, column)));
        body.append(...(turned ? rows.reverse() : rows));
        headings.forEach((other) => (other.ariaSort = "none"));
        heading.ariaSort = turned ? "ascending" : "descending";
      };
      heading.addEventListener("click", sort);
      heading.addEventListener("keydown", (event) => event.key === "Enter" && sort());
    });
  }
});
