#include "settings.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "busy.h"

namespace stitch_bench {

namespace {

template <class Number>
Number number(const std::string& option, const std::string& text, Number least) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !(value >= least)) {
    throw std::invalid_argument(option + " is \"" + text + "\"; it takes a number from " +
                                std::to_string(least) + " on");
  }
  return value;
}

std::vector<std::string> parts(const std::string& list) {
  std::vector<std::string> names;
  std::istringstream stream(list);
  for (std::string name; std::getline(stream, name, ',');) {
    if (!name.empty()) names.push_back(name);
  }
  return names;
}

// "contention": what a user notices of a busy host, on an idle one and on busy ones.
void expand_contention(Settings& settings) {
  const auto found = std::find(settings.measures.begin(), settings.measures.end(), "contention");
  if (found == settings.measures.end()) return;
  const auto at = settings.measures.erase(found);
  settings.measures.insert(at, {"latency", "rate", "autograd", "step", "rref"});
  if (!settings.busy.empty()) return;
  const unsigned cores = std::max(1U, std::thread::hardware_concurrency());
  settings.busy = {"idle",  "1",     std::to_string(cores), std::to_string(2 * cores),
                   "torch", "pinned"};
}

}  // namespace

Settings parse_settings(const std::vector<std::string>& arguments) {
  Settings settings;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    std::string option = arguments[i];
    if (!option.starts_with("-")) {
      settings.measures.push_back(option);
      continue;
    }
    bool* const flag = option == "--all"                      ? &settings.all
                       : option == "--list"                   ? &settings.list
                       : option == "--help" || option == "-h" ? &settings.help
                       : option == "--pin"                    ? &settings.pin
                       : option == "--result-lines"           ? &settings.result_lines
                                                              : nullptr;
    if (flag != nullptr) {
      *flag = true;
      continue;
    }
    if (option == "--no-floors") {
      settings.floors = false;
      continue;
    }
    std::string value;
    if (const auto equals = option.find('='); equals != std::string::npos) {
      value = option.substr(equals + 1);
      option.resize(equals);
    } else if (i + 1 < arguments.size()) {
      value = arguments[++i];
    } else {
      throw std::invalid_argument("option " + option + " is unknown or needs a value; see --help");
    }
    if (option == "--rounds") {
      settings.rounds = number(option, value, 1);
    } else if (option == "--seconds") {
      settings.seconds = number(option, value, 0.001);
      if (!(settings.seconds <= 600))
        throw std::invalid_argument("--seconds is \"" + value + "\"; it takes at most 600");
    } else if (option == "--sizes") {
      settings.sizes_mib.clear();
      for (const auto& size : parts(value)) settings.sizes_mib.push_back(number(option, size, 1));
      if (settings.sizes_mib.empty())
        throw std::invalid_argument("--sizes is empty; it takes MiB, separated by commas");
    } else if (option == "--load-size") {
      settings.load_mib = number(option, value, 1);
    } else if (option == "--busy") {
      settings.busy = parts(value);
      for (const auto& kind : settings.busy) {
        if (!is_busy_kind(kind))
          throw std::invalid_argument("--busy has \"" + kind +
                                      "\"; it takes idle, numbers up to 999, torch and pinned");
      }
    } else if (option == "--transports") {
      settings.transports = parts(value);
    } else if (option == "--tcp-transport") {
      settings.tcp_transport = value;
    } else if (option == "--json") {
      settings.json_file = value;
    } else {
      throw std::invalid_argument("option " + option + " is unknown; see --help");
    }
  }
  expand_contention(settings);
  return settings;
}

std::string help_text() {
  return "stitch-bench: measures stitch between two processes of this host, and what the host "
         "itself can do.\n"
         "  stitch-bench [options] [measure...]\n\n"
         "Without names the quick set runs; each measure brings the floors that it is compared "
         "with.\n"
         "  --list               the measures, and what each is\n"
         "  --all                all of them\n"
         "  --no-floors          without the floors\n"
         "  --rounds N           all measures run N times, in turns; the table has the median "
         "round and [lowest..highest] (3)\n"
         "  --seconds S          time for each number, after warm-up (0.3)\n"
         "  --sizes LIST         MiB of the tensors that are echoed (1,16,64,256)\n"
         "  --load-size MIB      of the tensor that keeps a connection busy in `beside_bulk` "
         "(1024)\n"
         "  --busy LIST          what else wants the cores, in turns: idle, a number of processes "
         "that compute, torch\n"
         "                       (libtorch's threads of both processes compute), pinned (both on "
         "core 0). Keys begin with busy-KIND\n"
         "                       `contention` is latency, rate, autograd, step and rref with all "
         "of "
         "them\n"
         "  --pin                process i on core i\n"
         "  --transports LIST    of the measures called same_host (default: what stitch chooses)\n"
         "  --tcp-transport NAME of the measures called tcp (" +
         std::string(kDefaultTcpTransport) +
         ")\n"
         "  --result-lines       also prints lines \"RESULT key value unit\"\n"
         "  --json FILE          writes everything, each round included, to FILE\n"
         "  --help\n\n"
         "Exit status: 0; 1 a measure failed; 2 a wrong command line; 77 no device, for a measure "
         "that was named\nand needs one; 128 + signal after Ctrl-C.\n";
}

}  // namespace stitch_bench
