"""How token copies travel to the ranks of their experts, one file each."""
