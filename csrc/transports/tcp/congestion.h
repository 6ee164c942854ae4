// Congestion control of TCP connections.
//
// Pacing (BBR) pays on long paths. Within a host or a rack it sends small bursts on a timer, which takes twice the
// processor time of both ends for the same bytes and so is half as fast. A socket starts without pacing. Before a large
// transfer the round-trip time is known, and a long path gets the system's default congestion control. If that default
// does not pace, nothing is changed.
#pragma once

#include <cstdint>
#include <string_view>

namespace telegrad {

/// Round-trip time up to which a path needs no pacing.
inline constexpr std::uint32_t kMaxUnpacedRoundTrip = 1000;  // microseconds

/// Returns whether this congestion control paces.
bool paces(std::string_view name);

/// Disables pacing before a socket connects or listens (accepted sockets inherit this).
void disable_pacing(int socket);

/// Selects the congestion control for the path, before a large transfer.
void select_congestion_control(int socket);
void select_congestion_control(int socket, std::uint32_t round_trip);  // in microseconds

}  // namespace telegrad
