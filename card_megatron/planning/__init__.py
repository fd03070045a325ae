"""Memory, speed and layout of a run before it starts: configuration in, numbers out, no accelerator needed."""
