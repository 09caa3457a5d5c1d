#include "measure.h"

#include <stdexcept>

#include "stitch/base/name_list.h"

namespace stitch_bench {

const std::vector<Measure>& all_measures() {
  static const std::vector<Measure> measures{
      floor_sockets(),
      floor_memcpy(),
      floor_tensorpipe_latency(),
      floor_tensorpipe_rate(),
      floor_tensorpipe_bandwidth(),
      memory_base(),
      latency(),
      rate(),
#ifdef STITCH_BENCH_CONNECT
      connect(),
#endif
      bandwidth(),
      beside_bulk(),
      idle(),
      steal(),
      autograd(),
      step(),
      rows(),
      saving(),
      rref(),
      allocs(),
      gpu(),
  };
  return measures;
}

const Measure& find_measure(const std::string& name) {
  std::vector<std::string> names;
  for (const Measure& measure : all_measures()) {
    if (measure.name == name) return measure;
    names.push_back(measure.name);
  }
  throw std::invalid_argument("measure \"" + name +
                              "\" is unknown; known are: " + stitch::base::join_names(names));
}

}  // namespace stitch_bench
