"""Parts of the machine that processes use: listening sockets and the memory allocator."""
