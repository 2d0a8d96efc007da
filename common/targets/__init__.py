"""What a run learns of a record, if not its class: labels, numbers, or the time to an event."""
