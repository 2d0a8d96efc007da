"""The run configuration: settings, their sections and how they are parsed."""
