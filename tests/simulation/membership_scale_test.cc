// What the members of a large world send one another: real MembershipProtocol objects over a
// network that loses nothing, with every notice and connection counted.
#include <bit>
#include <deque>
#include <map>
#include <memory>

#include "stitch/base/bytes.h"
#include "stitch/rpc/membership/membership_protocol.h"
#include "tests/simulation/kernel.h"
#include "tests/support/plain_test.h"

namespace stitch::rpc::membership_scale_test {
namespace {

using Ms = std::chrono::milliseconds;
using Protocol = MembershipProtocol;
using Index = std::uint32_t;
using simulation::Time;

struct Counts {
  std::size_t notices = 0;
  std::size_t bytes = 0;  // of them
  std::size_t connections = 0;
};

class LargeWorld {
 public:
  static constexpr Ms kLatency{1};
  explicit LargeWorld(Index size) {
    std::vector<KnownLife> founders;
    for (Index i = 0; i < size; ++i) founders.push_back({card(i)});
    for (Index i = 0; i < size; ++i) add(i).protocol.start(founders);
    // All have met in a barrier.
    for (Index i = 0; i < size; ++i) {
      for (Index distance = 1; distance < size; distance *= 2) link(i, (i + distance) % size);
    }
    run(Ms(2000));
  }

  [[nodiscard]] Counts& counts() { return counts_; }
  [[nodiscard]] std::size_t size() const { return nodes_.size(); }
  void run(Ms time) {
    const Time end = now_ + time;
    while (!agenda_.empty() && agenda_.time() <= end) {
      now_ = agenda_.time();
      auto task = agenda_.take();
      task();
    }
    now_ = end;
  }
  void kill(Index index) {
    Node& node = *nodes_[index];
    node.alive = false;
    for (const auto& [other, heard] : std::exchange(node.links, {})) unlink(other, index);
  }
  // The live worker with the lowest id lets it in.
  void join() {
    const Index index = static_cast<Index>(nodes_.size());
    add(index).member = false;
    Node& sponsor = **std::ranges::find_if(nodes_, [](const auto& each) { return each->alive; });
    carry_out(sponsor, sponsor.protocol.admit(index, card(index), now_));
  }
  void leave(Index index) { carry_out(*nodes_[index], nodes_[index]->protocol.leave(now_)); }
  // All that live know the same.
  [[nodiscard]] bool agrees() const {
    const Node* first = nullptr;
    for (const auto& node : nodes_) {
      if (!node->alive) continue;
      if (first == nullptr) first = node.get();
      if (node->protocol.digests() != first->protocol.digests()) return false;
    }
    return first != nullptr;
  }

 private:
  struct Node {
    Protocol protocol;
    bool alive = true;
    bool member = true;
    int ticks = 0;
    std::vector<std::pair<Index, Notice>> waiting{};  // until it is a member
    std::map<Index, Time> links{};                    // when each was heard
  };

  static MemberCard card(Index index) {
    return {{"worker" + std::to_string(index), WorkerId(index), 1},
            {"tcp://10.0.0.1:" + std::to_string(10'000 + index)},
            std::string(100, 'r')};
  }
  void at(Time when, simulation::Task task) { agenda_.add(when, std::move(task)); }
  Node& add(Index index) {
    nodes_.push_back(std::make_unique<Node>(Node{Protocol(card(index), {})}));
    at(now_ + Ms(index % 250), [this, index] { tick(index); });
    return *nodes_.back();
  }
  void link(Index a, Index b) {
    if (a == b || nodes_[a]->links.contains(b)) return;
    nodes_[a]->links[b] = nodes_[b]->links[a] = now_;
    ++counts_.connections;
  }
  void unlink(Index at_node, Index lost) {
    if (nodes_[at_node]->links.erase(lost) == 0) return;
    at(now_ + kLatency, [this, at_node, lost] { tell_lost(at_node, lost); });
  }
  void tell_lost(Index at_node, Index lost) {
    Node& node = *nodes_[at_node];
    if (!node.alive) return;
    carry_out(node, node.protocol.on_link_lost(nodes_[lost]->protocol.self(),
                                               Error(ErrorCode::disconnected, "closed"), now_));
  }
  // True if there is a connection now.
  bool connect(Index from, Index to) {
    if (nodes_[to]->alive) {
      link(from, to);
      return true;
    }
    at(now_ + kLatency, [this, from, to] { tell_lost(from, to); });
    return false;
  }
  void tick(Index index) {
    Node& node = *nodes_[index];
    if (!node.alive) return;
    if (!node.member) return at(now_ + Ms(250), [this, index] { tick(index); });
    if (++node.ticks % Protocol::kTicks == 0) {
      for (const auto& [linked, heard] : node.links) {
        at(now_ + kLatency, [this, index, other = linked, digests = node.protocol.digests()] {
          Node& there = *nodes_[other];
          if (!there.alive || !there.links.contains(index)) return;
          there.links[index] = now_;
          carry_out(there,
                    there.protocol.on_heartbeat(nodes_[index]->protocol.self(), digests, now_));
        });
      }
    }
    std::vector<Protocol::Link> seen;
    for (Index other = 0; other < nodes_.size(); ++other) {
      if (other == index) continue;
      const auto bound = node.links.find(other);
      seen.push_back({WorkerId(other), 1, bound == node.links.end() ? Time{} : bound->second,
                      bound != node.links.end()});
    }
    carry_out(node, node.protocol.on_tick(now_, seen));
    at(now_ + Ms(250), [this, index] { tick(index); });
  }
  void carry_out(Node& node, Protocol::Effects effects) {
    const Index self = node.protocol.self().id.value();
    for (const auto& [info, why] : effects.lose) {
      if (node.links.erase(info.id.value()) != 0) unlink(info.id.value(), self);
    }
    for (auto& [to, notice] : effects.send) {
      ++counts_.notices;
      base::Bytes bytes;
      notice.write(bytes);
      counts_.bytes += bytes.size();
      const Index other = to.id.value();
      if (!connect(self, other)) continue;
      at(now_ + kLatency, [this, self, other, notice = std::move(notice)] {
        Node& there = *nodes_[other];
        if (!there.member) {
          there.waiting.emplace_back(self, notice);
          return;
        }
        if (there.alive)
          carry_out(there, there.protocol.on_notice(nodes_[self]->protocol.self(), notice, now_));
      });
    }
    for (const auto& to : effects.reach) connect(self, to.id.value());
    for (const auto& each : effects.probes) {
      at(now_ + 2 * kLatency, [this, self, about = each.about] {
        Node& here = *nodes_[self];
        if (here.alive)
          carry_out(here, here.protocol.on_probe(about, nodes_[about.id.value()]->alive, now_));
      });
    }
    for (const auto& answer : effects.answers) {
      ASSERT_FALSE(answer.refusal || answer.elsewhere);
      Node& joiner = *nodes_[answer.joiner.id.value()];
      joiner.member = true;
      carry_out(joiner,
                joiner.protocol.on_lives(node.protocol.lives(), node.protocol.self(), now_));
      for (const auto& [from, waiting] : std::exchange(joiner.waiting, {}))
        carry_out(joiner, joiner.protocol.on_notice(nodes_[from]->protocol.self(), waiting, now_));
    }
    if (effects.leave_done) kill(self);
  }

  std::vector<std::unique_ptr<Node>> nodes_;
  simulation::Agenda<simulation::Task> agenda_;
  Time now_{std::chrono::hours(1)};
  Counts counts_;
};

class MembershipScale : public ::testing::TestWithParam<Index> {
 protected:
  // Runs `change`, which is `events` joins, deaths or leaves, and what follows from it: for each of
  // them at most N log2 N notices and N connections.
  template <class F>
  void expect_few(const char* what, std::size_t events, F&& change) {
    world.counts() = {};
    change();
    world.run(Ms(2500));
    const Counts counts = world.counts();
    const std::size_t n = world.size();
    std::printf("%zu workers, %s: %zu notices, %.0f KiB, %zu connections\n", n, what,
                counts.notices, static_cast<double>(counts.bytes) / 1024, counts.connections);
    const auto rounds = static_cast<std::size_t>(std::bit_width(n - 1));
    EXPECT_LE(counts.notices, events * n * rounds) << what;
    EXPECT_LE(counts.connections, events * n) << what;
    EXPECT_LE(counts.bytes, events * n * rounds * 1024) << what;
    EXPECT_TRUE(world.agrees()) << what;
  }
  LargeWorld world{GetParam()};
};

TEST_P(MembershipScale, EachEventCostsAtMostNLogNNotices) {
  const Index n = GetParam();
  // Each worker has a connection to the one that decides, and to those of the barrier.
  EXPECT_EQ(world.counts().notices, 0U);
  EXPECT_LE(world.counts().connections, n * static_cast<std::size_t>(std::bit_width(n)));
  expect_few("nothing happens", 0, [] {});
  expect_few("10 joins", 10, [&] {
    for (int i = 0; i < 10; ++i) {
      world.join();
      world.run(Ms(20));
    }
  });
  expect_few("10 joins at once", 10, [&] {
    for (int i = 0; i < 10; ++i) world.join();
  });
  expect_few("a death", 1, [&] { world.kill(n / 2); });
  expect_few("10 deaths at once", 10, [&] {
    for (Index i = 0; i < 10; ++i) world.kill(n / 3 + i);
  });
  expect_few("a leave", 1, [&] { world.leave(n / 4); });
  expect_few("the death of the one that decides, after 11 others", 1, [&] { world.kill(0); });
  expect_few("the deaths of the next two that decide", 2, [&] {
    world.kill(1);
    world.kill(2);
  });
  expect_few("the leave of the one that decides", 1, [&] { world.leave(3); });
}

INSTANTIATE_TEST_SUITE_P(Of, MembershipScale, ::testing::Values(64, 256, 1024));

}  // namespace
}  // namespace stitch::rpc::membership_scale_test
