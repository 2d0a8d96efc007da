"""Tables of counts that sites release in runs that count instead of learning."""
