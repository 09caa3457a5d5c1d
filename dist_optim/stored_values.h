#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "stitch/dist_optim/named_values.h"
#include "stitch/rref/owner_part.h"

namespace stitch::optim {

// An optimizer's options and state as a checkpoint has them. All throw Error(invalid_argument) for
// what no optimizer has. Thread contract: any thread.

// The options of the groups, "1.lr" for group 1.
[[nodiscard]] CheckpointValues join_groups(const std::vector<NamedValues>& groups);
// Back again, of so many groups; the number of the next step, which stands beside them, is left
// out. Groups may have no options.
[[nodiscard]] std::vector<NamedValues> split_groups(const CheckpointValues& values,
                                                    std::size_t groups);
// The number of the next step.
inline constexpr const char* kStepName = "step";
[[nodiscard]] std::int64_t next_step_in(const CheckpointValues& values);

// The state of a parameter as dense tensors that share memory with it: of "m" that is sparse
// "m.indices", "m.values" and "m.sizes".
[[nodiscard]] rref::StoredObject::Fields to_fields(const NamedValues& state);
// Back again. Numbers stay tensors, as FieldAssigner takes them.
[[nodiscard]] NamedValues from_fields(const rref::StoredObject::Fields& fields,
                                      const at::Tensor& parameter);
// Values of these types and sizes that take no memory, dense for what is sparse.
[[nodiscard]] NamedValues blank_values(const std::vector<rref::StoredTensor>& tensors,
                                       const at::Tensor& parameter);

}  // namespace stitch::optim
