#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/calls/extension.h"
#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/rpc/message/message.h"
#include "stitch/rpc/worker.h"
#include "tests/support/cluster.h"
#include "tests/support/error_of.h"
#include "tests/support/eventually.h"

// Sections that no correct worker sends, in requests. A program that includes this registers an
// extension of its workers.
namespace stitch::testing {

struct Section {
  std::uint16_t kind;
  std::vector<std::byte> bytes;
};

// While it exists, the requests of worker 0 have these sections, too. One at a time; calls are made
// by its own thread.
class AddedSections {
 public:
  explicit AddedSections(std::vector<Section> sections) : sections_(std::move(sections)) {
    current = &sections_;
  }
  ~AddedSections() { current = nullptr; }
  AddedSections(const AddedSections&) = delete;
  AddedSections& operator=(const AddedSections&) = delete;

 private:
  class AddThem final : public rpc::Extension {
   public:
    explicit AddThem(rpc::Agent& agent) : first_(agent.self().id.value() == 0) {}
    void on_send(rpc::OutMessage& message, const WorkerInfo&) override {
      const auto* const sections = current.load();
      if (sections == nullptr || !first_ || message.frame.kind() != rpc::wire::kRequest) return;
      for (const Section& each : *sections) message.frame.add_section(each.kind, each.bytes);
    }

   private:
    const bool first_;
  };
  static inline std::atomic<const std::vector<Section>*> current{nullptr};
  [[maybe_unused]] static inline const int extension =
      rpc::register_extension([](rpc::Agent& agent) -> std::unique_ptr<rpc::Extension> {
        return std::make_unique<AddThem>(agent);
      });

  const std::vector<Section> sections_;
};

// Why worker 1 lost worker 0, whose `call` to it had these sections and failed for that.
[[nodiscard]] inline std::string loss_by(Cluster& cluster, std::vector<Section> sections,
                                         const std::function<void()>& call) {
  const auto error = [&] {
    const AddedSections added(std::move(sections));
    return error_of(call);
  }();
  EXPECT_EQ(error.code(), ErrorCode::disconnected) << error.what();
  const auto lost = [&] { return cluster[1].agent()->peers().lost(WorkerId(0)); };
  EXPECT_TRUE(eventually([&] { return lost().has_value(); }));
  return lost() ? lost()->what() : "";
}

}  // namespace stitch::testing
