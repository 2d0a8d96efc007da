"""Methods whose sites send a head, or statistics from which the coordinator solves for one."""
