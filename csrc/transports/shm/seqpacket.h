// Packets of a Unix socket, and descriptors passed with them.
#pragma once

#include <sys/socket.h>

#include <cstddef>

#include "base/unique_fd.h"

namespace telegrad {

/// Sends one packet without blocking, with an optional descriptor; returns 0 or an errno.
int send_packet(int socket, const void* data, std::size_t size, int passed = -1);

/// Returns the first descriptor of a received packet and closes the others.
UniqueFd received_fd(msghdr& message);

}  // namespace telegrad
