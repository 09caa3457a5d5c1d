#pragma once

#include <string>
#include <vector>

namespace stitch_bench {

// The transport of the measures on path "tcp".
inline constexpr const char* kDefaultTcpTransport = "tcp";

// The command line.
struct Settings {
  std::vector<std::string> measures;  // names; empty: the quick set
  bool all = false;
  bool list = false;
  bool help = false;

  int rounds = 3;
  double seconds = 0.3;                        // for each number, after warm-up
  std::vector<int> sizes_mib{1, 16, 64, 256};  // of the tensors that are echoed
  int load_mib = 1024;                         // of the tensor that keeps a connection busy
  bool pin = false;                            // process i on core i
  bool floors = true;
  std::vector<std::string> busy{};  // kinds of busy.h, in turns; idle alone when it is empty

  std::vector<std::string>
      transports{};  // of the measures on path "same_host"; empty: chosen by stitch
  std::string tcp_transport = kDefaultTcpTransport;

  bool result_lines = false;
  std::string json_file{};
};

// Throws std::invalid_argument naming the option and its valid values.
[[nodiscard]] Settings parse_settings(const std::vector<std::string>& arguments);
[[nodiscard]] std::string help_text();

}  // namespace stitch_bench
