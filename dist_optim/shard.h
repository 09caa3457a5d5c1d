#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "stitch/dist_optim/named_values.h"

namespace stitch::optim {

// The contents of a shard: one owner's file of a checkpoint (docs/checkpoints.md).

// The beginning of a shard.
struct ShardHeader {
  std::string optimizer;            // its type, "torch::optim::Adam"
  std::string owner;                // the worker that owns these parameters
  std::vector<std::string> owners;  // of the whole checkpoint: complete when each has a shard
  std::string save_id;  // equal in all shards of one save; later saves have greater ones
  NamedValues options;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(optimizer, owner, owners, save_id, options);
  }
};

// One parameter in a shard. `state` is absent for a parameter that had not been stepped yet.
struct SavedParameter {
  std::string name;
  std::vector<std::int64_t> sizes;
  std::optional<NamedValues> state;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(name, sizes, state);
  }
};

}  // namespace stitch::optim
