"""Every message between processes: declarations, codec and split."""
