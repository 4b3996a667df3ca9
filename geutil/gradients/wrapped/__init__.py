"""Functions, Keras layers and models that are wrapped as checkpointed."""
