"use strict";
// Selects one load, dims systems, and shows the tooltip under the pointer.
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];

  const choices = all("[data-load]");
  const panels = all("[data-panel]");
  const choose = (number) => {
    for (const choice of choices) choice.setAttribute("aria-pressed", String(choice.dataset.load === number));
    for (const panel of panels) panel.hidden = panel.dataset.panel !== number;
  };
  for (const choice of choices) choice.addEventListener("click", () => choose(choice.dataset.load));
  if (choices.length) {
    document.documentElement.classList.add("picks");
    choose(choices[choices.length - 1].dataset.load);
  }

  const buttons = all("[data-system]");
  const dim = () => {
    const selected = buttons.filter((button) => button.getAttribute("aria-pressed") === "true");
    for (const button of buttons) {
      const isDim = selected.length > 0 && !selected.includes(button);
      for (const mark of all(`svg .n${button.dataset.system}`)) mark.classList.toggle("dim", isDim);
    }
  };
  for (const button of buttons) {
    button.addEventListener("click", () => {
      button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
      dim();
    });
  }

  const tip = document.getElementById("tip");
  const show = (event) => {
    const text = event.target.closest("[data-tip]")?.dataset.tip;
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const { width, height } = tip.getBoundingClientRect();
    const room = document.documentElement.clientWidth - width - 8;
    tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, room))}px`;
    tip.style.top = `${Math.max(8, event.clientY - height - 14)}px`;
  };
  for (const name of ["pointermove", "pointerdown"]) document.addEventListener(name, show);
  document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
})();
