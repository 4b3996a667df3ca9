"""Cross-layer equalization: channels of neighbouring layers get like ranges."""
