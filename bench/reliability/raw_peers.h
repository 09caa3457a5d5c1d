#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace stitch_reliability {

// TCP connections to 127.0.0.1:port that send nothing. One that the other side closes is opened
// again. Thread contract: one thread.
class RawPeers {
 public:
  explicit RawPeers(std::uint16_t port) : port_(port) {}
  ~RawPeers();
  RawPeers(const RawPeers&) = delete;
  RawPeers& operator=(const RawPeers&) = delete;

  // Brings their number to `wanted`, as far as the system has sockets for them. Returns their
  // number.
  std::size_t keep(std::size_t wanted);
  // How many were closed by the other side.
  [[nodiscard]] std::size_t closed() const { return closed_; }

 private:
  const std::uint16_t port_;
  std::vector<int> sockets_;
  std::size_t closed_ = 0;
};

// The TCP ports that this process listens on.
[[nodiscard]] std::vector<std::uint16_t> listening_ports();

}  // namespace stitch_reliability
