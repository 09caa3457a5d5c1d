#include "stitch/rpc/peers/members.h"

#include <functional>
#include <utility>

#include "stitch/base/name_list.h"
#include "stitch/base/printable.h"
#include "stitch/rpc/message/life_text.h"
#include "stitch/rpc/peers/peer.h"

namespace stitch::rpc {

namespace {

std::string quoted_list(const std::vector<std::string>& names) {
  std::string list;
  for (const auto& name : names) list += (list.empty() ? "\"" : ", \"") + name + "\"";
  return list;
}

}  // namespace

PeerLife::PeerLife(Member its_member, PeerLife* former)
    : member(std::move(its_member)), previous(former) {}

PeerLife::~PeerLife() = default;

Members::~Members() {
  for (auto& each : names_) {
    for (Name* name = each.load(); name != nullptr;) delete std::exchange(name, name->next);
  }
}

std::optional<Error> Members::refusal(const WorkerInfo& info) const {
  const auto refused = [&](const std::string& why) {
    return Error(ErrorCode::invalid_argument, to_string(info) + " cannot join: " + why)
        .with_worker(info.name);
  };
  if (info.id.value() >= base::PublishedTable<PeerLife>::kMaxSize) {
    return refused("ids are below " + std::to_string(base::PublishedTable<PeerLife>::kMaxSize));
  }
  const Name* known = named(info.name);
  if (known != nullptr && known->id != info.id)
    return refused("the name is that of " + to_string(find(known->id)));
  const PeerLife* present = life(info.id);
  if (present == nullptr) return std::nullopt;
  if (present->info().name != info.name)
    return refused("the id is that of worker \"" + present->info().name + "\"");
  if (present->info().epoch < info.epoch) return std::nullopt;
  return refused("its epoch " + std::to_string(info.epoch) + " is not higher than epoch " +
                 std::to_string(present->info().epoch) + ", which was here before");
}

PeerLife& Members::add(Member member, const Complete& complete) {
  if (auto why = refusal(member.info)) throw std::move(*why);
  PeerLife* former = life(member.info.id);
  const std::uint32_t id = member.info.id.value();
  auto life = std::make_unique<PeerLife>(std::move(member), former);
  // What takes memory comes first: a life that was published would be refused the next time.
  auto name =
      former == nullptr ? std::make_unique<Name>(life->info().name, life->info().id) : nullptr;
  complete(*life);
  PeerLife& added = lives_.publish(id, std::move(life));
  if (name) {
    auto& head = bucket(added.info().name);
    name->next = head.load();
    head.store(name.release(), std::memory_order_release);
    size_.fetch_add(1);
  }
  return added;
}

std::vector<WorkerInfo> Members::infos() const {
  std::vector<WorkerInfo> infos;
  for_each([&](const PeerLife& life) { infos.push_back(life.info()); });
  return infos;
}

std::atomic<Members::Name*>& Members::bucket(std::string_view name) const {
  return names_[std::hash<std::string_view>{}(name) % kBuckets];
}

const Members::Name* Members::named(std::string_view name) const {
  const Name* known = bucket(name).load(std::memory_order_acquire);
  while (known != nullptr && known->name != name) known = known->next;
  return known;
}

const WorkerInfo& Members::find(std::string_view name) const {
  if (const Name* known = named(name)) return life(known->id)->info();
  std::vector<std::string> names;
  for_each([&](const PeerLife& life) { names.push_back(life.info().name); });
  auto nearest = base::nearest_names(std::string(name), names, 5);
  if (nearest.empty() && names.size() <= 8) nearest = std::move(names);
  throw Error(ErrorCode::not_found,
              "worker \"" + std::string(name) + "\" is not in this world of " +
                  std::to_string(size()) +
                  (nearest.empty() ? "" : "; known are " + quoted_list(nearest)))
      .with_worker(std::string(name));
}

const WorkerInfo& Members::find(WorkerId id) const {
  if (const PeerLife* present = life(id)) return present->info();
  throw Error(ErrorCode::not_found, "worker id " + std::to_string(id.value()) +
                                        " is not in this world; ids are 0 to " +
                                        std::to_string(lives_.end() - 1));
}

const WorkerInfo& Members::find(const WorkerInfo& info) const {
  const WorkerInfo& known = find(info.id);
  // A reference that came before the news of its owner names it by id and epoch alone.
  const bool named = !info.name.empty();
  if (known.epoch == info.epoch && (!named || known.name == info.name)) return known;
  if (named && known.name != info.name) {
    throw Error(ErrorCode::not_found, to_string(info) + " is not in this world: id " +
                                          std::to_string(info.id.value()) + " is worker \"" +
                                          known.name + "\"")
        .with_worker(info.name);
  }
  if (known.epoch < info.epoch) {
    throw Error(ErrorCode::disconnected,
                life_text(info, LifeName::brief) +
                    " is not known here yet; the last one known is epoch " +
                    std::to_string(known.epoch))
        .with_worker(info.name);
  }
  throw life_gone(info, "; it is now epoch " + std::to_string(known.epoch));
}

std::string Members::claimed_identity(const transport::Hello& hello) {
  return "worker \"" + base::printable(hello.name) + "\" (id " + std::to_string(hello.id) +
         ", epoch " + std::to_string(hello.epoch) + ")";
}

std::optional<Error> Members::objection(const transport::Hello& hello) const {
  const auto not_here = [&](ErrorCode code) {
    return Error(code, claimed_identity(hello) + " is not in this world");
  };
  const PeerLife* present = life(WorkerId(hello.id));
  if (present == nullptr || present->info().name != hello.name)
    return not_here(ErrorCode::unauthenticated);
  if (present->info().epoch != hello.epoch) return not_here(ErrorCode::disconnected);
  return std::nullopt;
}

}  // namespace stitch::rpc
