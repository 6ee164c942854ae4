// Factories of all transports, one function each; registry.cc assigns their schemes.
#pragma once

#include "core/transport.h"

namespace telegrad {

Transport* shm_transport();     // shm:@abstract-name, shm:/path
Transport* unix_transport();    // unix:@abstract-name, unix:/path
Transport* tcp_transport();     // tcp:host:port, tls:host:port
Transport* inproc_transport();  // inproc:name, within this process

}  // namespace telegrad
