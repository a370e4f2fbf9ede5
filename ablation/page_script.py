"""What moves in the report: which setting is shown, and the order of rows. Without it all is there."""

SCRIPT = """
(() => {
  const choose = document.querySelector(".choose");
  const sections = document.querySelectorAll("[data-view]");
  const show = (wanted) => sections.forEach((section) => {
    section.classList.toggle("off", wanted !== "all" && section.dataset.view !== wanted);
  });
  if (choose) {
    choose.hidden = false;
    choose.addEventListener("change", (event) => show(event.target.value));
    show(choose.querySelector("input:checked").value);
  }
  const key = (row, column) => {
    const text = row.cells[column].dataset.value ?? row.cells[column].textContent;
    return text !== "" && !Number.isNaN(Number(text)) ? Number(text) : text;
  };
  const compare = (a, b, sign) => {
    if (a === "" || b === "") return (a === "") - (b === "");  // no number: always last
    return sign * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(b));
  };
  document.querySelectorAll("table.sortable").forEach((table) => {
    table.querySelectorAll("th button").forEach((button) => button.addEventListener("click", () => {
      const head = button.closest("th"), column = head.cellIndex;
      const up = head.getAttribute("aria-sort") === "descending" || !head.hasAttribute("aria-sort")
        && head.classList.contains("text");
      table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => compare(key(a, column), key(b, column), up ? 1 : -1));
      table.tBodies[0].append(...rows);
    }));
  });
  addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((one) => { one.open = true; });
  });
})();
"""
