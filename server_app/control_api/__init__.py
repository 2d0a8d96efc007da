"""The SuperLink's Control API: its runs, and the sites that it knows."""
