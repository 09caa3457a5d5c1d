#include "stitch/rref/rref_agent.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "stitch/base/demangle.h"

namespace stitch::rref {
namespace {

using namespace std::chrono_literals;

// How long a ledger waits for a ride.
rpc::Clock::duration patience(Urgency urgency) {
  switch (urgency) {
    case Urgency::soon:
      return 1ms;
    case Urgency::later:
      return 20ms;
    default:
      return 200ms;
  }
}
// Twice this is the age at which a borrow is registered and an operation without acknowledgement is
// sent again.
constexpr auto kTick = 500ms;
// How long at least a borrow outlives its message before it is registered: longer than a settlement
// waits for a ride, so that a reference on its way back to its sender is settled first.
constexpr auto kKept = 50ms;

// Zero means no limit, and so does more than the clock can tell.
bool limited(std::chrono::nanoseconds timeout) {
  return timeout > 0ns && timeout < rpc::Clock::time_point::max() - rpc::Clock::now();
}

class RRefExtension final : public rpc::Extension {
 public:
  explicit RRefExtension(rpc::Agent& agent) : rrefs(std::make_shared<RRefAgent>(agent)) {
    agent.set_frame_handler(wire::kLedgerFrame,
                            [weak = std::weak_ptr(rrefs)](rpc::InMessage message) {
                              if (const auto alive = weak.lock()) alive->on_ledger_frame(message);
                            });
  }
  ~RRefExtension() override {
    rrefs->stop();
    rrefs->destroy_remains();
  }
  void on_send(rpc::OutMessage& message, const WorkerInfo& to) override {
    rrefs->on_send(message, to);
  }
  void on_receive(rpc::InMessage& message) override { rrefs->on_receive(message); }
  void on_decode(rpc::InMessage& message, rpc::ExecutionContext& ambient) override {
    const auto* refs = message.find_attachment<IncomingRefs>();
    if (refs != nullptr && refs->create() && limited(refs->create()->timeout)) {
      ambient.deadline = std::min(ambient.deadline, rpc::Clock::now() + refs->create()->timeout);
    }
  }
  bool take_over(const std::shared_ptr<rpc::IncomingCall>& call) override {
    return rrefs->take_over(call);
  }
  void on_peer_lost(const WorkerInfo& peer, const Error& reason) override {
    rrefs->on_peer_lost(peer, reason);
  }
  void stop() override { rrefs->stop(); }
  void on_all_ended() override { rrefs->destroy_remains(); }
  void debug_info(std::map<std::string, std::int64_t>& numbers) override {
    rrefs->debug_info(numbers);
  }

  const std::shared_ptr<RRefAgent> rrefs;
};

// The creator waits for the owner's word, not for a clock of its own: both agree on one outcome.
class PendingCreation final : public rpc::PendingCall {
 public:
  PendingCreation(std::shared_ptr<RRefAgent> rrefs, const RRefId& id)
      : rrefs_(std::move(rrefs)), id_(id) {}
  void on_reply(rpc::InMessage&) override {
    rrefs_->perform(rrefs_->lifetime().answered(id_, std::nullopt));
  }
  void on_error(const Error& error) override {
    if (id_.owner == rrefs_->lifetime().self()) {
      rrefs_->perform(rrefs_->lifetime().resolve(
          id_, nullptr, error));  // nothing new if its creation ended already
    } else if (error.remote()) {
      rrefs_->perform(rrefs_->lifetime().answered(id_, error));
    } else {
      rrefs_->perform(rrefs_->lifetime().create_not_sent(id_, error));
    }
  }

 private:
  const std::shared_ptr<RRefAgent> rrefs_;
  const RRefId id_;
};

}  // namespace

int register_rref_extension() {
  static const int index =
      rpc::register_extension([](rpc::Agent& agent) -> std::unique_ptr<rpc::Extension> {
        return std::make_unique<RRefExtension>(agent);
      });
  return index;
}

namespace {
Error not_made(const Error& why, std::string_view function, const WorkerInfo& to) {
  return why
      .with_prefix("call " + std::string(function) + "() to " + to_string(to) + " was not made")
      .with_worker(to.name)
      .with_function(std::string(function));
}
}  // namespace

Handle::~Handle() { rrefs->perform(rrefs->lifetime().drop_local(id)); }

std::shared_ptr<RRefAgent> RRefAgent::of(rpc::Agent& agent) {
  return static_cast<RRefExtension&>(agent.extension(kRRefExtension)).rrefs;
}

RRefAgent::RRefAgent(rpc::Agent& agent)
    : self_(agent.self()),
      knows_losses_(std::none_of(agent.options().transports.begin(),
                                 agent.options().transports.end(),
                                 [](const std::string& transport) {
                                   return transport == "tensorpipe-shm" || transport == "uv";
                                 })),
      agent_(&agent),
      lifetime_(life_of(agent.self())) {
  // Asked for messages of peers only, while the agent and its table of peers are there.
  lifetime_.set_world([&agent](const WorkerLife& life) {
    return life.id < agent.peers().size() && agent.peers().infos()[life.id].epoch == life.epoch;
  });
}

std::shared_ptr<rpc::Agent> RRefAgent::agent() const {
  base::MutexLock lock(mutex_);
  return agent_ == nullptr ? nullptr : agent_->weak_from_this().lock();
}

void RRefAgent::perform(Effects effects) {
  for (Effects::Run& waiter : effects.run) waiter();
  effects.destroy.clear();  // see box()
  if (effects.kept) watch_kept();
  for (const auto& [peer, urgency] : effects.flush) schedule_flush(peer, urgency);
}

// A method may run on an object whose Entry is gone, and its end may come on any thread: so the
// pointer itself knows where the object is to be destroyed. After stop(), nowhere but here.
std::shared_ptr<void> RRefAgent::box(rpc::OwnedObject value) {
  return std::shared_ptr<rpc::OwnedObject>(
      new rpc::OwnedObject(std::move(value)), [weak = weak_from_this()](rpc::OwnedObject* last) {
        std::unique_ptr<rpc::OwnedObject> owned(last);
        const auto self = weak.lock();
        const auto alive = self ? self->agent() : nullptr;
        if (!alive) return;
        try {
          alive->post([owned = std::move(owned)]() mutable { owned.reset(); });
        } catch (const std::exception&) {
          // Out of memory: it was destroyed here.
        }
      });
}

HandlePtr RRefAgent::own(rpc::OwnedObject value) {
  const auto alive = agent();
  if (!alive) throw Error(ErrorCode::shutting_down, "this worker has shut down");
  const RRefId id = lifetime_.add_object(box(std::move(value)));
  return std::make_shared<Handle>(shared_from_this(), id, alive->self());
}

HandlePtr RRefAgent::adopt(const RRefId& id) {
  WorkerInfo owner{"", WorkerId(id.owner.id), id.owner.epoch};
  if (const auto alive = agent(); alive && id.owner.id < alive->peers().size())
    owner.name = alive->peers().find(owner.id).name;
  lifetime_.add_local(id);
  return std::make_shared<Handle>(shared_from_this(), id, std::move(owner));
}

std::shared_ptr<rpc::Agent> RRefAgent::require_usable(const Handle& handle,
                                                      std::string_view function) const {
  auto alive = agent();
  if (!alive)
    throw Error(ErrorCode::shutting_down,
                to_string(handle.id) + " cannot be used: its worker has shut down");
  if (const auto lost = lifetime_.status(handle.id).lost)
    throw rpc::CallRefused(not_made(*lost, function, handle.owner));
  return alive;
}

HandlePtr RRefAgent::create(const WorkerInfo& to, const std::string& function,
                            std::chrono::nanoseconds timeout, rpc::OutMessage message) {
  const auto alive = agent();
  if (!alive) throw Error(ErrorCode::shutting_down, "this worker has shut down");
  RRefId id;
  try {
    id = life_of(to) == lifetime_.self() ? lifetime_.add_object(nullptr)
                                         : lifetime_.begin_create(life_of(to));
  } catch (const Error& error) {
    throw not_made(error, function, to);
  }
  auto handle = std::make_shared<Handle>(shared_from_this(), id, to);
  message.attachment<OutgoingRefs>().create({id, timeout});
  alive->start_call(to, function, 0ns, std::move(message),
                    std::make_shared<PendingCreation>(shared_from_this(), id));
  return handle;
}

void RRefAgent::on_send(rpc::OutMessage& message, const WorkerInfo& to) {
  if (auto* refs = message.find_attachment<OutgoingRefs>())
    refs->leave(shared_from_this(), message, to);
  base::Bytes ledger;
  if (lifetime_.encode_ledger(life_of(to), ledger))
    message.frame.add_section(wire::kLedgerSection, ledger.span());
}

void RRefAgent::on_receive(rpc::InMessage& message) {
  // References before the ledger: what keeps objects goes first.
  if (auto refs = IncomingRefs::read(shared_from_this(), message))
    message.attachments.push_back(std::move(refs));
  if (const auto* ledger = message.view.section(wire::kLedgerSection))
    accept_ledger(message, ledger->bytes);
}

void RRefAgent::on_ledger_frame(const rpc::InMessage& message) {
  accept_ledger(message, message.view.body());
}

void RRefAgent::accept_ledger(const rpc::InMessage& message, std::span<const std::byte> frame) {
  auto effects = lifetime_.accept_ledger(life_of(message.from), frame);
  const auto broken = std::move(effects.broken);
  perform(std::move(effects));
  if (broken) throw *broken;
}

namespace {
// What a call on an object is told when the one that was to make it has failed.
Error not_created(const Error& failure) {
  constexpr const char* kPrefix = "its object was not created";
  // The refusal was made for the creator, who knows the function's name.
  if (failure.code() == ErrorCode::unimplemented) {
    return Error(failure.code(), std::string(kPrefix) +
                                     ": the function that was to make it is not registered there")
        .with_function("remote");
  }
  return failure.with_prefix(kPrefix);
}
}  // namespace

bool RRefAgent::take_over(const std::shared_ptr<rpc::IncomingCall>& call) {
  auto* refs = call->message().find_attachment<IncomingRefs>();
  if (refs == nullptr || (!refs->create() && !refs->target())) return false;
  if (refs->create()) {
    if (call->function() != nullptr) refs->set_creating(call->function()->name);
    start_creation_timer(call, *refs);
  }
  if (!refs->target()) {
    serve(call, *refs, nullptr);
    return true;
  }
  if (refs->target_id().owner != lifetime_.self() || !lifetime_.owned(refs->target_id())) {
    call->fail(lifetime_.status(refs->target_id())
                   .lost.value_or(Error(ErrorCode::disconnected,
                                        to_string(refs->target_id()) + " is not owned by " +
                                            to_string(call->agent().self()))));
    return true;
  }
  // Behind the creation, if that has not ended; no thread waits. The message keeps the object until
  // the call is answered.
  when_created(refs->target_id(),
               [self = shared_from_this(), call, refs](const std::shared_ptr<void>& object,
                                                       const std::optional<Error>& failure) {
                 if (failure) {
                   call->fail(not_created(*failure));
                 } else {
                   refs->keep(object);
                   self->serve(call, *refs, static_cast<const rpc::OwnedObject*>(object.get()));
                 }
               });
  return true;
}

void RRefAgent::serve(const std::shared_ptr<rpc::IncomingCall>& call, const IncomingRefs& refs,
                      const rpc::OwnedObject* target) {
  rpc::Agent& alive = call->agent();
  if (target != nullptr && refs.target()->use == TargetUse::await) {
    call->reply([](rpc::OutArchive&) {});
    return;
  }
  if (target != nullptr && refs.target()->use == TargetUse::fetch) {
    alive.post([call, target] {
      call->run_task([&] {
        if (target->encode == nullptr)
          throw Error(
              ErrorCode::invalid_argument,
              "an object of type " + base::demangle(target->type->name()) + " cannot be sent");
        call->reply([&](rpc::OutArchive& archive) {
          target->encode(archive, target->object.get());
          archive.seal();
        });
      });
    });
    return;
  }
  const rpc::Function* function = call->function();
  const std::type_info* wanted = function == nullptr ? nullptr : function->object_type;
  if (function == nullptr || (target != nullptr) != (wanted != nullptr)) {
    call->fail(Error(ErrorCode::protocol,
                     "the request does not name a function that fits what it is about"));
    return;
  }
  if (wanted != nullptr && *wanted != *target->type) {
    call->fail(Error(ErrorCode::invalid_argument,
                     "the object is of type " + base::demangle(target->type->name()) + ", not " +
                         base::demangle(wanted->name()) + ", which the method belongs to"));
    return;
  }
  void* object = target == nullptr ? nullptr : target->object.get();
  if (refs.create()) {
    alive.dispatch(call, [self = shared_from_this(), call, id = refs.create()->id, object] {
      self->serve_creation(call, id, object);
    });
  } else {
    alive.dispatch(call, [call, object] { call->run(object); });
  }
}

void RRefAgent::serve_creation(const std::shared_ptr<rpc::IncomingCall>& call, const RRefId& id,
                               void* object) {
  call->run_keeping(object, [self = shared_from_this(), call, id](rpc::OwnedObject value,
                                                                  std::exception_ptr exception) {
    auto* const refs = call->message().find_attachment<IncomingRefs>();
    if (refs->creation_timer != 0) call->agent().loop().cancel(refs->creation_timer);
    if (!exception) {
      self->perform(self->lifetime_.resolve(id, self->box(std::move(value)), std::nullopt));
      call->reply([](rpc::OutArchive&) {});
      return;
    }
    try {
      std::rethrow_exception(exception);
    } catch (const rpc::CallRefused& refused) {
      call->fail(refused);
    } catch (...) {
      call->fail_in_handler(exception);  // on its way it becomes the object's outcome
    }
  });
}

void RRefAgent::start_creation_timer(const std::shared_ptr<rpc::IncomingCall>& call,
                                     IncomingRefs& refs) {
  const auto timeout = refs.create()->timeout;
  if (!limited(timeout)) return;
  refs.creation_timer = call->agent().loop().call_at(
      rpc::Clock::now() + timeout, [weak = std::weak_ptr(call), timeout] {
        const auto late = weak.lock();
        if (!late) return;
        const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(timeout).count();
        late->fail(
            Error(ErrorCode::timeout, "creation timed out after " + std::to_string(ms) + " ms"));
        late->request_stop();  // here: the handler may be what keeps every user-function thread
                               // busy
      });
}

namespace {
Error life_is_over(const WorkerInfo& peer, std::uint64_t epoch, const std::string& why) {
  return Error(ErrorCode::disconnected,
               "worker \"" + peer.name + "\" epoch " + std::to_string(epoch) + " is gone" + why)
      .with_worker(peer.name);
}
}  // namespace

void RRefAgent::on_peer_lost(const WorkerInfo& peer, const Error& reason) {
  perform(lifetime_.peer_lost(life_of(peer),
                              life_is_over(peer, peer.epoch, std::string(": ") + reason.what())));
}

void RRefAgent::meet_owner(const WorkerLife& owner) {
  const auto alive = agent();
  if (!alive || owner == lifetime_.self()) return;
  if (owner.id >= alive->peers().size())
    throw Error(ErrorCode::protocol, "a reference names worker id " + std::to_string(owner.id) +
                                         ", which is not in this world");
  const WorkerInfo& now = alive->peers().find(WorkerId(owner.id));
  if (now.epoch == owner.epoch) return;
  perform(lifetime_.peer_lost(
      owner, life_is_over(now, owner.epoch, "; it is now epoch " + std::to_string(now.epoch))));
}

Error RRefAgent::lost_at(const WorkerInfo& from, const WorkerLife& owner) const {
  const auto alive = agent();
  WorkerInfo of{"", WorkerId(owner.id), owner.epoch};
  if (alive && owner.id < alive->peers().size()) of.name = alive->peers().find(of.id).name;
  return life_is_over(of, owner.epoch, ": the reference was lost at " + to_string(from));
}

void RRefAgent::require_alive(const WorkerInfo& peer) const {
  const auto alive = agent();
  if (!alive) throw Error(ErrorCode::shutting_down, "this worker has shut down");
  if (const auto lost = alive->peers().lost(peer.id)) throw *lost;
}

void RRefAgent::stop() {
  const Error why(ErrorCode::shutting_down, "this worker has shut down");
  auto leaving = lifetime_.leave(why);
  auto closing = lifetime_.close();
  {
    // Handlers that still run may stand in a method or hold what local_value() gave them.
    base::MutexLock lock(mutex_);
    for (auto* objects : {&leaving.destroy, &closing.destroy})
      std::move(objects->begin(), objects->end(), std::back_inserter(remains_));
  }
  leaving.destroy.clear();
  closing.destroy.clear();
  perform(std::move(leaving));
  perform(std::move(closing));
  base::MutexLock lock(mutex_);
  agent_ = nullptr;
  due_.clear();
}

void RRefAgent::destroy_remains() {
  std::vector<std::shared_ptr<void>> remains;
  {
    base::MutexLock lock(mutex_);
    remains.swap(remains_);
  }
}

void RRefAgent::debug_info(std::map<std::string, std::int64_t>& numbers) const {
  const auto counts = lifetime_.counts();
  const auto put = [&](const char* name, std::size_t number) {
    numbers.emplace(std::string("rref.") + name, static_cast<std::int64_t>(number));
  };
  put("entries", counts.entries);
  put("entries_pending", counts.owned.in(OwnerTable::Value::pending));
  put("entries_failed", counts.owned.in(OwnerTable::Value::failed));
  put("entries_waiting_calls", counts.owned.waiters);
  put("holders", counts.owned.holders);
  put("holds", counts.holds);
  using State = HolderTable::State;
  for (const auto& [name, state] :
       {std::pair("holds_creating", State::creating), std::pair("holds_borrowed", State::borrowed),
        std::pair("holds_registering", State::registering),
        std::pair("holds_registered", State::registered), std::pair("holds_lost", State::lost)})
    put(name, counts.held.in(state));
  put("pins", counts.tokens);
  put("creditors", counts.held.creditors);
  put("registrations", counts.held.registrations);
  put("ledger_unsent", counts.ledger_unsent);
  put("ledger_unacknowledged", counts.ledger_unacknowledged);
  put("ledger_frames", ledger_frames_.load());
}

void RRefAgent::schedule_flush(const WorkerLife& peer, Urgency urgency) {
  if (urgency == Urgency::none) return;
  const auto when = rpc::Clock::now() + patience(urgency);
  std::shared_ptr<rpc::Agent> alive;
  {
    base::MutexLock lock(mutex_);
    if (agent_ == nullptr) return;
    const auto [found, fresh] = due_.try_emplace(peer, when);
    if (!fresh && found->second <= when) return;
    found->second = when;
    alive = agent_->weak_from_this().lock();
  }
  if (!alive) return;
  alive->loop().call_at(when, [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->flush_due();
  });
  start_ticking();
}

void RRefAgent::flush_due() {
  const auto now = rpc::Clock::now();
  std::vector<WorkerLife> peers;
  {
    base::MutexLock lock(mutex_);
    for (auto at = due_.begin(); at != due_.end();) {
      if (at->second <= now) {
        peers.push_back(at->first);
        at = due_.erase(at);
      } else {
        ++at;
      }
    }
  }
  const auto alive = agent();
  if (!alive) return;
  for (const WorkerLife& peer : peers) {
    for (;;) {  // nothing is due any more when another message gave it a ride
      rpc::OutMessage message(wire::kLedgerFrame);
      if (!lifetime_.encode_ledger(peer, message.frame.body())) break;
      ledger_frames_.fetch_add(1);
      try {
        alive->send_control(alive->peers().find(WorkerId(peer.id)), std::move(message));
      } catch (const Error&) {
        break;  // it is repeated at a later tick
      }
    }
  }
}

void RRefAgent::start_ticking() {
  const auto alive = agent();
  {
    base::MutexLock lock(mutex_);
    if (ticking_ || !alive) return;
    ticking_ = true;
  }
  alive->loop().call_at(rpc::Clock::now() + kTick, [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->tick();
  });
}

void RRefAgent::watch_kept() {
  const auto alive = agent();
  {
    base::MutexLock lock(mutex_);
    if (watching_kept_ || !alive) return;
    watching_kept_ = true;
  }
  alive->loop().call_at(rpc::Clock::now() + kKept, [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->register_kept();
  });
}

void RRefAgent::register_kept() {
  {
    base::MutexLock lock(mutex_);
    watching_kept_ = false;
  }
  perform(lifetime_.register_kept());
}

void RRefAgent::tick() {
  {
    base::MutexLock lock(mutex_);
    ticking_ = false;
  }
  perform(lifetime_.tick());
  const auto counts = lifetime_.counts();
  // An idle worker has no timer.
  if (counts.ledger_unacknowledged + counts.held.in(HolderTable::State::borrowed) > 0)
    start_ticking();
}

}  // namespace stitch::rref
