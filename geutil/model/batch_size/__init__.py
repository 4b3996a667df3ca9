"""Another batch size: the ops that bake the old one in, their repair, and the proof."""
