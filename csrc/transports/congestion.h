// Which congestion control a TCP connection uses.
//
// One that paces what it sends (BBR) earns its keep on long paths. Within a host or a rack it sends in small bursts on
// a timer, which takes twice the processor time of both ends for the same bytes and so is half as fast. A socket begins
// without; whoever is about to send much knows by then how long the path is, and gives a long one back what the
// system's administrator chose. Where that does not pace, nothing is touched.
#pragma once

#include <cstdint>
#include <string_view>

namespace telegrad {

/// A path this short needs no pacing.
inline constexpr std::uint32_t kShortPath = 1000;  // microseconds there and back

/// Does this congestion control pace?
bool paces(std::string_view name);

/// Before a socket connects or listens (those it accepts are like it).
void begin_unpaced(int socket);

/// Before much is sent over a connection: what suits its path.
void suit_path(int socket);
void suit_path(int socket, std::uint32_t round_trip);  // in microseconds

}  // namespace telegrad
