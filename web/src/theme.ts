// Light and dark: as the system has it, until a person says otherwise.

import { DARK_FILLS } from "./colours";
import { button } from "./dom";

/** A worker, which runs this script too, has no screen. */
const SYSTEM = globalThis.matchMedia?.("(prefers-color-scheme: dark)");

/** Called when the colours of the page change. */
const listeners: (() => void)[] = [];

export function onTheme(listener: () => void): void {
  listeners.push(listener);
}

export function isDark(): boolean {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : SYSTEM.matches;
}

/** Colours of a drawing that are not of a single op. */
export interface Tones {
  page: string;
  text: string;
  dim: string;
  scope: string;
  edge: string;
  control: string;
  chosen: string;
  found: string;
}

const LIGHT_TONES: Tones = {
  page: "#ffffff",
  text: "#1f2933",
  dim: "#52606d",
  scope: "#f6f8fbb3",
  edge: "#7f8b99",
  control: "#a3adb9",
  chosen: "#1d4ed8",
  found: "#c77700",
};
const DARK_TONES: Tones = {
  page: "#14181d",
  text: "#eef2f7",
  dim: "#b4bfcb",
  scope: "#1d232bb3",
  edge: "#8793a1",
  control: "#66717e",
  chosen: "#7aa2ff",
  found: "#ffb703",
};

export function tones(): Tones {
  return isDark() ? DARK_TONES : LIGHT_TONES;
}

/** A colour that something is filled with: in the dark, with letters in light upon it. */
export function fill(colour: string): string {
  return isDark() ? DARK_FILLS[colour] : colour;
}

/** A colour of lines. */
export function stroke(colour: string): string {
  return isDark() ? lightened(colour) : colour;
}

/** The share of white in lines on the dark page. */
const LIGHTER = 0.35;

const mixes = new Map<string, string>();

function lightened(colour: string): string {
  let made = mixes.get(colour);
  if (!made) {
    const parts = [1, 3, 5].map((at) => {
      const part = parseInt(colour.slice(at, at + 2), 16);
      const value = Math.round(part * (1 - LIGHTER) + 255 * LIGHTER);
      return value.toString(16).padStart(2, "0");
    });
    made = `#${parts.join("")}`;
    mixes.set(colour, made);
  }
  return made;
}

/** The switch; it tells what it would do. */
export function themeSwitch(): HTMLElement {
  const made = button("", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    changed();
  });
  made.className = "theme";
  const changed = (): void => {
    made.textContent = isDark() ? "light colours" : "dark colours";
    for (const listener of listeners) listener();
  };
  SYSTEM.addEventListener("change", () => changed());
  changed();
  return made;
}
