"""ZeroMQ sockets and SocketMapping."""
