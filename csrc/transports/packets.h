// Packets of a Unix socket, and the descriptors that pass with them.
#pragma once

#include <sys/socket.h>

#include <cstddef>

#include "transports/descriptor.h"

namespace telegrad {

/// One packet without waiting, perhaps with a descriptor; 0 or an error number.
int send_packet(int socket, const void* data, std::size_t size, int passed = -1);

/// The first descriptor that came with a packet; the others are closed.
Descriptor passed_with(msghdr& message);

}  // namespace telegrad
