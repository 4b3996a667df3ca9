// Brings what is drawn to what is to be drawn, and leaves alone what stays: in a large
// drawing that is nearly everything, and making it anew takes seconds.

import type {
  Core,
  ElementDefinition,
  NodeSingular,
  Position,
  SingularElementArgument,
} from "cytoscape";

/** Adds, changes and removes elements; `wanted` holds nodes before the edges of them. */
export function update(core: Core, wanted: ElementDefinition[]): void {
  const ids = new Set(wanted.map(({ data }) => data.id!));
  core.batch(() => {
    core.elements().filter((element) => !ids.has(element.id())).remove();
    const added = wanted.filter((definition) => {
      const drawn = core.getElementById(definition.data.id!);
      if (drawn.empty()) return true;
      renew(drawn, definition);
      return false;
    });
    core.add(added);
  });
}

function renew(drawn: SingularElementArgument, wanted: ElementDefinition): void {
  const { data, classes, position } = wanted;
  const changed = Object.entries(data).filter(([name, value]) => drawn.data(name) !== value);
  if (changed.length) drawn.data(Object.fromEntries(changed));
  if (drawn.classes().join(" ") !== classes) drawn.classes(classes as string);
  if (position) move(drawn as NodeSingular, position);
}

function move(node: NodeSingular, wanted: Position): void {
  const { x, y } = node.position();
  if (x !== wanted.x || y !== wanted.y) node.position(wanted);
}
