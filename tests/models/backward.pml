/* The protocol of a pass (dist_autograd/PROTOCOL.md): 3 workers, up to 5 links, messages in any order. One process takes one step after
   another; a step handles a message, runs a node, or lets a strand become quiet.

   A link l leads from a RecvNode on worker R[l] to a SendNode on worker S[l]. The RecvNode waits for the SendNodes of the links in D[l],
   all on R[l]; SEED stands for a root. `used` is what a root leads to.

   -DANY_GRAPH=n  any graph of n links, instead of the chosen ones
   -DSETTLES  with what the ACKs tell about links without gradients (G11)
   -DABORTS   a worker gives up at any point
   -DCRASHES  one worker dies at any point
   -DRETURNS  it comes back with another life, which others hear of at different times, before or after the death; with CRASHES
   -DFORMER   a worker of the pass is the next life of one that others hear the loss of only now
   Broken variants, each of which the verifier must refuse: see the macros BROKEN_... below and CMakeLists.txt. */

#define W 3
#define L 5
#define NONE 3
#define SEED 32
#define bit(i) (1 << (i))
#define at(from, to) ((from) * W + (to))

/* Phases of the pass on a worker. */
#define ABSENT 0
#define GRADIENTS 1 /* gradients flow and are counted */
#define MARKING 2
#define CLOSED 3 /* what is unmarked is dead */
#define FAILED 4
#define ENDED 5

byte graph;
byte R[L], S[L], D[L];
byte links, used;

/* Workers. */
byte phase[W], parent[W], deficit[W], participants[W], peers[W], lost[W];
byte owed[9];    /* at(self, peer): GRADIENTS to acknowledge, parent's first apart */
byte expects[9]; /* at(self, peer): messages sent that are not acknowledged */
bool fresh[W], quiet[W], context_failed[W], dead[W];
byte not_done, has_done;
bool begun, succeeded, crashed, aborted;

/* Links, as bits. */
byte outbox, ran, received, killed, marked, marked_recv;

/* Messages on their way. */
byte gradients, final, marks, quiets, closes, dones, aborts;
byte rides[L], names[L];                        /* ACKs that ride on GRADIENTS */
byte acks[9], last_ack_count[9], last_ack_names[9]; /* by at(from, to) */
#ifdef SETTLES
/* Links without gradients, modulo 256: what others know of this worker's; what it was told and has not passed on; in answers on their way. */
byte known[W], below[W], rides_missing[L], last_ack_missing[9];
#endif
byte losses;                                    /* workers that have not noticed the death yet */
byte victim;
#ifdef RETURNS
/* Lives (PassLives). What a worker sends to another goes to the life that it knows. */
byte met;       /* workers that have heard of the next life of the victim */
byte noted[W];  /* of which workers this one deals with the first life */
byte noted_next; /* those that deal with the next life of the victim */
#endif
#ifdef FORMER
byte untold; /* workers that have not heard of the loss of the former life yet */
#endif

/* Scratch. */
byte i, l, w, v, marks_now;
bool go;

#define running(x) (phase[x] >= GRADIENTS && phase[x] <= CLOSED)
#define sends_at(x) ((S[0] == x && links > 0 -> 1 : 0) | (S[1] == x && links > 1 -> 2 : 0) | (S[2] == x && links > 2 -> 4 : 0) | (S[3] == x && links > 3 -> 8 : 0) | (S[4] == x && links > 4 -> 16 : 0))
#define all_sends_resolved(x) ((sends_at(x) & ~(received | killed)) == 0)
#define alive_open(x) (!dead[x] && running(x))
#define without_gradients(x) (sends_at(x) & ~received)
#define count(bits) (((bits) & 1) + ((bits) >> 1 & 1) + ((bits) >> 2 & 1) + ((bits) >> 3 & 1) + ((bits) >> 4 & 1))
#define missing_of_all (without_gradients(0) | (participants[0] & 2 -> without_gradients(1) : 0) | (participants[0] & 4 -> without_gradients(2) : 0))

/* The node waits for nothing that its strand has not taken, and something live leads to it. */
#define live_inputs(k) ((D[k] & SEED) != 0 || (D[k] & received) != 0)
#define ready(k) (k < links && !(ran & bit(k)) && alive_open(R[k]) && !fresh[R[k]] && live_inputs(k) && (D[k] & 31 & ~(received | killed)) == 0)
#define any_ready(x) ((ready(0) && R[0] == x) || (ready(1) && R[1] == x) || (ready(2) && R[2] == x) || (ready(3) && R[3] == x) || (ready(4) && R[4] == x))
#define outbox_of(x) ((R[0] == x -> outbox & 1 : 0) | (R[1] == x -> outbox & 2 : 0) | (R[2] == x -> outbox & 4 : 0) | (R[3] == x -> outbox & 8 : 0) | (R[4] == x -> outbox & 16 : 0))

#define sendable(k) ((outbox & bit(k)) != 0 && alive_open(R[k]))

/* ---- failures */

#define tell(x) if :: !dead[x] -> aborts = aborts | bit(x) :: else fi

inline tell_concerned(x) {
#ifdef BROKEN_ABORT_REACHES_ONLY_THE_ROOT
  v = 1 & ~bit(x);
#else
  v = (peers[x] | participants[x] | 1) & ~bit(x);
#endif
  if :: v & 1 -> tell(0) :: else fi;
  if :: v & 2 -> tell(1) :: else fi;
  if :: v & 4 -> tell(2) :: else fi;
  v = 0
}
inline fail(x) {
  if
  :: running(x) -> phase[x] = FAILED; context_failed[x] = true; tell_concerned(x)
  :: else
  fi
}
inline forget_riding(k) {
  rides[k] = 0;
  names[k] = 0;
#ifdef SETTLES
  rides_missing[k] = 0;
#endif
  skip
}
inline forget_answer(l) {
  last_ack_count[l] = 0;
  last_ack_names[l] = 0;
#ifdef SETTLES
  last_ack_missing[l] = 0;
#endif
  skip
}
#define has_lost(from, to) ((lost[from] & bit(to)) != 0)
#ifdef RETURNS
#define knows_next(x, y) (crashed && (y) == victim && (met & bit(x)) != 0)
#define unreachable(from, to) (has_lost(from, to) && !knows_next(from, to))
/* The pass on x deals with worker y from now on: with the life that x knows. The first one that it deals with stays. */
inline note(x, y) {
  if
  :: (noted[x] & bit(y)) == 0 && !(y == victim && (noted_next & bit(x)) != 0) ->
     if :: knows_next(x, y) -> noted_next = noted_next | bit(x) :: else -> noted[x] = noted[x] | bit(y) fi
  :: else
  fi
}
/* A message of y: the next life of the victim sends none but ABORT. */
inline note_sender(x, y) {
  if :: !(y == victim && (noted_next & bit(x)) != 0) -> noted[x] = noted[x] | bit(y) :: else fi
}
inline note_all(x, who) {
  if :: (who) & 1 -> note(x, 0) :: else fi;
  if :: (who) & 2 -> note(x, 1) :: else fi;
  if :: (who) & 4 -> note(x, 2) :: else fi
}
#ifdef BROKEN_A_NEXT_LIFE_STANDS_IN
#define deals_with_next(x) ((met & bit(x)) != 0)
#else
#define deals_with_next(x) ((noted_next & bit(x)) != 0 || (noted[x] & bit(victim)) == 0 && (met & bit(x)) != 0)
#endif
/* The next life does not know the pass: it answers all that asks for something with ABORT. */
#ifdef BROKEN_A_NEXT_LIFE_IS_SILENT
#define is_refused_by_next(x, y) false
#else
#define is_refused_by_next(x, y) knows_next(x, y)
#endif
#else
#define unreachable(from, to) has_lost(from, to)
#define note(x, y) skip
#define note_sender(x, y) skip
#define note_all(x, who) skip
#define deals_with_next(x) false
#define is_refused_by_next(x, y) false
#endif

/* ---- Dijkstra and Scholten */

inline expect_ack(from, to) {
  deficit[from]++;
  expects[at(from, to)]++;
  peers[from] = peers[from] | bit(to)
}
inline take_ack(x, from, count, who) {
  note_all(x, who);
  assert(expects[at(x, from)] >= count);
  expects[at(x, from)] = expects[at(x, from)] - count;
  deficit[x] = deficit[x] - count;
  participants[x] = participants[x] | who
}
#ifdef SETTLES
/* What an answer of x tells: by how much the number of links without gradients has changed, here and below. */
inline tell_missing(x, told) {
#ifdef BROKEN_TELLS_TOTALS
  told = told + below[x] + count(without_gradients(x));
#else
  told = told + below[x] + count(without_gradients(x)) - known[x];
#endif
  known[x] = count(without_gradients(x));
#ifndef BROKEN_TELLS_TWICE
  below[x] = 0
#endif
  skip
}
#endif
inline answer_parent(x) {
  if
  :: unreachable(x, parent[x]) -> fail(x)
  :: else ->
     if
     :: !dead[parent[x]] ->
        last_ack_count[at(x, parent[x])] = last_ack_count[at(x, parent[x])] + 1 + owed[at(x, parent[x])];
        last_ack_names[at(x, parent[x])] = last_ack_names[at(x, parent[x])] | participants[x] | bit(x);
#ifdef SETTLES
        tell_missing(x, last_ack_missing[at(x, parent[x])]);
#endif
        skip
     :: else
     fi;
     owed[at(x, parent[x])] = 0;
     parent[x] = NONE
  fi
}
/* The first message finds no parent; any other is acknowledged at once. */
inline engage(x, by) {
  if
  :: x == 0 || parent[x] != NONE ->
     if
     :: unreachable(x, by) -> fail(x)
     :: !unreachable(x, by) && !dead[by] -> acks[at(x, by)]++
     :: else
     fi
  :: else -> parent[x] = by
  fi
}

/* ---- marking */

#ifdef BROKEN_MARKS_WHAT_HAS_RUN
#define has_run(k) false
#else
#define has_run(k) ((ran & bit(k)) != 0)
#endif
#ifdef BROKEN_MARKS_ONLY_FROM_ROOTS
#define reaches(k) (!has_run(k) && (D[k] & (SEED | marked)) != 0)
#else
#define reaches(k) (!has_run(k) && (D[k] & (SEED | marked | received)) != 0)
#endif
/* The RecvNodes of x that are reached and were not marked before: one MARK each. All are peers before the first is sent. */
inline send_marks(x) {
  i = 0;
  do
  :: i < links ->
     if
     :: R[i] == x && !(marked_recv & bit(i)) && reaches(i) ->
        marked_recv = marked_recv | bit(i);
        marks_now = marks_now | bit(i);
        expect_ack(x, S[i])
     :: else
     fi;
     i++
  :: else -> break
  od;
  i = 0;
  do
  :: i < links ->
     if
     :: marks_now & bit(i) ->
        note(x, S[i]);
        if
        :: unreachable(x, S[i]) -> fail(x)
        :: !unreachable(x, S[i]) && is_refused_by_next(x, S[i]) -> tell(x)
        :: !unreachable(x, S[i]) && !dead[S[i]] -> marks = marks | bit(i)
        :: else
        fi
     :: else
     fi;
     i++
  :: else -> break
  od;
  marks_now = 0;
  i = 0
}

/* Known everywhere what the loss uses: the other SendNodes are dead. */
inline kill_unmarked(x) {
  phase[x] = CLOSED;
  killed = killed | (sends_at(x) & ~(marked | received));
  fresh[x] = true;
  quiet[x] = false
}
inline send_close(x) {
  if
  :: not_done & bit(x) ->
     note(0, x);
     if
     :: unreachable(0, x) -> fail(0)
     :: !unreachable(0, x) && is_refused_by_next(0, x) -> tell(0)
     :: !unreachable(0, x) && !dead[x] -> closes = closes | bit(x)
     :: else
     fi
  :: else
  fi
}
inline send_quiet(x) {
  if
  :: participants[0] & bit(x) ->
#ifndef BROKEN_DOES_NOT_COUNT_QUIET
     expect_ack(0, x);
#endif
     note(0, x);
     if
     :: unreachable(0, x) -> fail(0)
     :: !unreachable(0, x) && is_refused_by_next(0, x) -> tell(0)
     :: !unreachable(0, x) && !dead[x] -> quiets = quiets | bit(x)
     :: else
     fi
  :: else
  fi
}

/* What the new state of worker x allows. */
inline advance(x) {
  if
  :: running(x) && phase[x] == GRADIENTS && quiet[x] ->
     v = 0;
     do
     :: v < W ->
        if
        :: v != parent[x] && owed[at(x, v)] != 0 ->
           if :: !dead[v] -> acks[at(x, v)] = acks[at(x, v)] + owed[at(x, v)] :: else fi;
           owed[at(x, v)] = 0
        :: else
        fi;
        v++
     :: else -> break
     od;
     v = 0
  :: else
  fi;
#ifdef BROKEN_ANSWERS_BEFORE_QUIET
#define calm(x) true
#else
#define calm(x) quiet[x]
#endif
#ifdef BROKEN_IGNORES_ITS_DEFICIT
#define settled(x) (deficit[x] == 0 || x != 0)
#else
#define settled(x) (deficit[x] == 0)
#endif
  if
  :: x != 0 && parent[x] != NONE && settled(x) && ((phase[x] == GRADIENTS && calm(x)) || phase[x] == MARKING) -> answer_parent(x)
  :: else
  fi;
  if
  :: x == 0 && phase[0] == GRADIENTS && quiet[0] && deficit[0] == 0 && begun ->
     participants[0] = participants[0] & ~1;
     has_done = 0;
#ifdef SETTLES
     v = below[0] + count(without_gradients(0));
     assert((v == 0) == (missing_of_all == 0));
     assert(v != 0 || (ran == used && received == used)); /* when it is settled, all nodes have run */
     v = 0;
#endif
     send_quiet(1);
     send_quiet(2);
     if
     :: running(0) ->
        phase[0] = MARKING;
        if :: !all_sends_resolved(0) -> send_marks(0) :: else fi
     :: else
     fi
  :: else
  fi;
  if
  :: x == 0 && phase[0] == MARKING && deficit[0] == 0 ->
     participants[0] = participants[0] & ~1;
#ifdef BROKEN_FORGETS_NEWCOMERS
     not_done = participants[0] & ~has_done & ~bit(2);
#else
     not_done = participants[0] & ~has_done;
#endif
     kill_unmarked(0);
     send_close(1);
     send_close(2)
  :: else
  fi;
  if
#define ends(x) (phase[x] == CLOSED && quiet[x] && all_sends_resolved(x))
  :: ends(x) ->
     if
     :: x != 0 ->
        phase[x] = ENDED;
        if
        :: unreachable(x, 0) -> context_failed[x] = true; tell_concerned(x)
        :: !unreachable(x, 0) && !dead[0] -> dones = dones | bit(x)
        :: else
        fi
     :: x == 0 && not_done == 0 ->
        phase[0] = ENDED;
        succeeded = true;
        /* DONE is sound. */
        assert(gradients == 0);
        assert(ran == used && received == used);
        assert(phase[1] != GRADIENTS && phase[1] != MARKING && phase[1] != CLOSED || dead[1]);
        assert(phase[2] != GRADIENTS && phase[2] != MARKING && phase[2] != CLOSED || dead[2])
     :: else
     fi
  :: else
  fi
}

/* ---- messages */

/* A message of `from` opens the pass, or is the first of this peer: it or the root may be lost already. */
inline meet(x, from, first_phase) {
  if :: phase[x] == ABSENT -> phase[x] = first_phase; note_sender(x, 0) :: else fi;
  note_sender(x, from);
  peers[x] = peers[x] | bit(from)
}
inline look_for_losses(x, from) {
#ifndef BROKEN_DOES_NOT_LOOK_FOR_EARLY_LOSSES
  if :: (has_lost(x, from) || has_lost(x, 0)) && !deals_with_next(x) -> fail(x) :: else fi
#endif
  skip
}

inline on_gradients(k) {
  w = S[k];
  gradients = gradients & ~bit(k);
  if
  :: context_failed[w] && phase[w] == ABSENT -> tell(R[k])
  :: else ->
     meet(w, R[k], GRADIENTS);
     if
     :: running(w) ->
        assert(!(received & bit(k)) && !(killed & bit(k)));
        take_ack(w, R[k], rides[k], names[k]);
#ifdef SETTLES
        below[w] = below[w] + rides_missing[k];
#endif
        if
        :: phase[w] == GRADIENTS && !(final & bit(k)) ->
           if
           :: w == 0 || parent[w] != NONE -> owed[at(w, R[k])]++
           :: else -> parent[w] = R[k]
           fi
        :: else
        fi;
        assert(phase[w] == GRADIENTS || (marked & bit(k)) != 0);
        received = received | bit(k);
        fresh[w] = true;
        quiet[w] = false;
        advance(w);
        look_for_losses(w, R[k])
     :: else
     fi
  fi;
  final = final & ~bit(k);
  forget_riding(k);
  w = 0
}

inline on_mark(k) {
  w = S[k];
  marks = marks & ~bit(k);
  assert(phase[w] != ENDED || context_failed[w] || crashed || aborted);
  if
  :: context_failed[w] && phase[w] == ABSENT -> tell(R[k])
  :: else ->
     meet(w, R[k], MARKING);
     if
     :: running(w) ->
        assert(phase[w] != CLOSED);
        assert(!(received & bit(k)));
        if
        :: phase[w] == GRADIENTS ->
           assert(deficit[w] == 0 && parent[w] == NONE && owed[at(w, 0)] == 0 && owed[at(w, 1)] == 0 && owed[at(w, 2)] == 0);
           phase[w] = MARKING
        :: else
        fi;
        marked = marked | bit(k);
        engage(w, R[k]);
        if :: running(w) -> send_marks(w) :: else fi;
        advance(w);
        look_for_losses(w, R[k])
     :: else
     fi
  fi;
  w = 0
}

inline on_quiet(x) {
  quiets = quiets & ~bit(x);
  if
  :: running(x) ->
     assert(deficit[x] == 0 || phase[x] == MARKING);
     if
#ifdef BROKEN_IS_DONE_WITH_UNRESOLVED_SENDS
     :: true ->
        killed = killed | (sends_at(x) & ~received);
        phase[x] = CLOSED
#else
     :: all_sends_resolved(x) -> phase[x] = CLOSED
     :: !all_sends_resolved(x) ->
        phase[x] = MARKING;
#ifdef BROKEN_KILLS_WHEN_QUIET
        killed = killed | (sends_at(x) & ~(received | marked));
        fresh[x] = true;
        quiet[x] = false;
#endif
        engage(x, 0);
        if :: running(x) -> send_marks(x) :: else fi
#endif
     fi;
     advance(x)
  :: else
  fi
}

inline on_close(x) {
  closes = closes & ~bit(x);
  if
  :: running(x) ->
     assert(phase[x] == MARKING && deficit[x] == 0 && parent[x] == NONE);
     kill_unmarked(x);
     advance(x)
  :: else
  fi
}

inline on_done(x) {
  dones = dones & ~bit(x);
  if
  :: running(0) ->
     has_done = has_done | bit(x);
     if
     :: phase[0] == MARKING ->
#ifndef BROKEN_DOES_NOT_COUNT_QUIET
        take_ack(0, x, 1, 0)
#endif
     :: else -> assert(not_done & bit(x)); not_done = not_done & ~bit(x)
     fi;
     advance(0)
  :: else
  fi
}

inline on_abort(x) {
  aborts = aborts & ~bit(x);
  fail(x);
  context_failed[x] = true
}

/* ---- the strand */

/* GRADIENTS of link k leave. `ends`: nothing else is left to do here, and they go to the parent: they carry the answer to it, and need
   no acknowledgement themselves. */
inline send_gradients(k, ends) {
  w = R[k];
  outbox = outbox & ~bit(k);
  assert(!(received & bit(k)) && !(gradients & bit(k)) && !(killed & bit(k)));
  peers[w] = peers[w] | bit(S[k]);
  note(w, S[k]);
  if
  :: unreachable(w, S[k]) -> fail(w)
  :: else ->
     if
     :: phase[w] == GRADIENTS ->
        if
        :: ends && parent[w] == S[k] && go ->
           rides[k] = 1 + owed[at(w, S[k])];
           names[k] = participants[w] | bit(w);
           final = final | bit(k);
#if defined(SETTLES) && !defined(BROKEN_TELLS_NOTHING_WITH_GRADIENTS)
           tell_missing(w, rides_missing[k]);
#endif
           owed[at(w, S[k])] = 0;
           parent[w] = NONE
        :: else ->
#ifndef BROKEN_LOSES_ACKS_THAT_RIDE
           rides[k] = owed[at(w, S[k])];
#endif
           owed[at(w, S[k])] = 0;
           expect_ack(w, S[k])
        fi
     :: else
     fi;
     if
     :: !dead[S[k]] -> gradients = gradients | bit(k)
     :: else ->
        if :: is_refused_by_next(w, S[k]) -> tell(w) :: else fi;
        final = final & ~bit(k);
        forget_riding(k)
     fi
  fi;
  w = 0
}

inline become_quiet(x) {
  quiet[x] = true;
  advance(x)
}

inline crash(x) {
  crashed = true;
  victim = x;
  dead[x] = true;
  losses = 7 & ~bit(x);
  aborts = aborts & ~bit(x);
  quiets = quiets & ~bit(x);
  closes = closes & ~bit(x);
  if :: x == 0 -> dones = 0 :: else fi;
  i = 0;
  do
  :: i < links ->
     if
     :: S[i] == x ->
        gradients = gradients & ~bit(i);
        marks = marks & ~bit(i);
        final = final & ~bit(i);
        forget_riding(i)
     :: else
     fi;
     if :: R[i] == x -> outbox = outbox & ~bit(i) :: else fi;
     i++
  :: else -> break
  od;
  i = 0;
  do
  :: i < W ->
     acks[at(i, x)] = 0;
     forget_answer(at(i, x));
     i++
  :: else -> break
  od;
  i = 0
}

/* Worker x learns of the death. What the victim sent and x has not read is gone; MARK and GRADIENTS may have been read already. */
inline notice(x) {
  losses = losses & ~bit(x);
  lost[x] = lost[x] | bit(victim);
  acks[at(victim, x)] = 0;
  forget_answer(at(victim, x));
  if :: victim == 0 -> quiets = quiets & ~bit(x); closes = closes & ~bit(x) :: else fi;
  if :: x == 0 -> dones = dones & ~bit(victim) :: else fi;
#ifdef BROKEN_IGNORES_THE_LOSS_OF_PEERS
  if :: running(x) && victim == 0 -> fail(x) :: else fi
#else
  if :: running(x) && ((peers[x] | participants[x] | 1) & bit(victim)) && !deals_with_next(x) -> fail(x) :: else fi
#endif
}
#ifdef FORMER
/* Worker x learns of the loss of the former life of `victim`, which it knows the next one of. */
inline hear_of_former(x) {
  untold = untold & ~bit(x);
#ifdef BROKEN_LOSSES_GO_BY_WORKER
  if :: running(x) && ((peers[x] | participants[x] | 1) & bit(victim)) -> fail(x) :: else fi
#endif
  skip
}
#endif
inline drop_unread(x) {
  i = 0;
  do
  :: i < links ->
     if
     :: R[i] == victim && S[i] == x ->
        gradients = gradients & ~bit(i);
        marks = marks & ~bit(i);
        final = final & ~bit(i);
        forget_riding(i)
     :: else
     fi;
     i++
  :: else -> break
  od;
  i = 0
}

/* The root: its messages are counted from now on. */
inline begin() {
  begun = true;
  advance(0)
}

/* ---- the graphs */

#define link(k, recv, send, deps) R[k] = recv; S[k] = send; D[k] = deps

inline choose_graph() {
  if
  :: /* a chain of two calls to two workers; all used */
     link(0, 0, 1, SEED); link(1, 1, 0, 1); link(2, 0, 2, 2); link(3, 2, 0, 4); links = 4; used = 15
  :: /* nested calls; all used */
     link(0, 0, 1, SEED); link(1, 1, 2, 1); link(2, 2, 1, 2); link(3, 1, 0, 4); links = 4; used = 15
  :: /* paths that meet; all used */
     link(0, 0, 1, SEED); link(1, 0, 2, SEED); link(2, 1, 2, 1); link(3, 2, 0, 6); link(4, 2, 1, 6); links = 5; used = 31
  :: /* ping-pong between two workers, one result unused */
     link(0, 0, 1, SEED); link(1, 0, 1, 0); link(2, 1, 0, 3); link(3, 0, 1, 4); link(4, 1, 0, 8); links = 5; used = 29
  :: /* a worker that waits for a used link behind an unused one takes part only from the marking on */
     link(0, 0, 1, SEED); link(1, 2, 1, 0); link(2, 1, 2, 3); link(3, 2, 0, 4); link(4, 0, 1, 8); links = 5; used = 29
  :: /* unused links that feed unused ones, and nodes that wait for both kinds */
     link(0, 0, 1, SEED); link(1, 0, 2, 0); link(2, 2, 1, 2); link(3, 1, 2, 5); link(4, 2, 0, 10); links = 5; used = 25
  :: /* the root waits, others have nothing unused */
     link(0, 0, 1, SEED); link(1, 1, 2, 1); link(2, 2, 0, 0); link(3, 0, 2, SEED | 4); link(4, 2, 1, 8); links = 5; used = 27
  :: /* nothing waits, but results are unused */
     link(0, 0, 1, SEED); link(1, 2, 1, 0); link(2, 1, 2, 2); link(3, 1, 0, 1); links = 4; used = 9
  fi
}

#ifdef ANY_GRAPH
/* A link leads between two workers; its RecvNode waits for any of the SendNodes there that were made later, or for a root. */
inline choose_any_graph() {
  links = ANY_GRAPH;
  do
  :: l < ANY_GRAPH ->
     if :: R[l] = 0; D[l] = SEED :: R[l] = 0 :: R[l] = 1 :: R[l] = 2 fi;
     if :: R[l] != 0 -> S[l] = 0 :: R[l] != 1 -> S[l] = 1 :: R[l] != 2 -> S[l] = 2 fi;
     i = 0;
     do
     :: i < l && S[i] == R[l] -> D[l] = D[l] | bit(i); i++
     :: i < l -> i++
     :: i >= l -> break
     od;
     if :: D[l] & (SEED | used) -> used = used | bit(l) :: else fi;
     l++
  :: else -> break
  od;
  i = 0;
  l = 0
}
#endif

/* ---- what must hold when nothing more happens */

inline check_rest() {
  assert(gradients == 0 && marks == 0 && outbox == 0 || crashed || aborted);
  i = 0;
  do
  :: i < W ->
     if
     :: !dead[i] ->
        assert(!running(i)); /* the pass has ended everywhere */
        if
        :: succeeded -> assert(phase[i] != FAILED)
        :: !succeeded && !dead[0] -> assert(phase[i] == ABSENT || context_failed[i])
        :: else
        fi
     :: else
     fi;
     i++
  :: else -> break
  od;
  i = 0;
  if
  :: !crashed && !aborted -> assert(succeeded)
  :: else
  fi;
  if
  :: succeeded && !crashed ->
     assert(ran == used);      /* a node runs if and only if a root leads to it */
     assert(received == used); /* one gradient for each live link, none for others */
     assert((marked & ~used) == 0)
  :: else
  fi
}

init {
  d_step {
    parent[0] = NONE;
    parent[1] = NONE;
    parent[2] = NONE;
    phase[0] = GRADIENTS
  }
#ifdef ANY_GRAPH
  atomic { choose_any_graph() }
#else
  atomic { choose_graph() }
#endif
#ifdef FORMER
  atomic { if :: victim = 1 :: victim = 2 fi; untold = 7 & ~bit(victim) }
#endif
  do
  :: atomic { !begun && !dead[0] -> d_step { begin() } }
  :: atomic {
       gradients != 0 ->
       if :: gradients & 1 -> l = 0 :: gradients & 2 -> l = 1 :: gradients & 4 -> l = 2 :: gradients & 8 -> l = 3 :: gradients & 16 -> l = 4 fi;
       d_step { on_gradients(l); l = 0 }
     }
  :: atomic {
       marks != 0 ->
       if :: marks & 1 -> l = 0 :: marks & 2 -> l = 1 :: marks & 4 -> l = 2 :: marks & 8 -> l = 3 :: marks & 16 -> l = 4 fi;
       d_step { on_mark(l); l = 0 }
     }
  :: atomic { quiets & 2 -> d_step { on_quiet(1) } }
  :: atomic { quiets & 4 -> d_step { on_quiet(2) } }
  :: atomic { closes & 2 -> d_step { on_close(1) } }
  :: atomic { closes & 4 -> d_step { on_close(2) } }
  :: atomic { dones & 2 -> d_step { on_done(1) } }
  :: atomic { dones & 4 -> d_step { on_done(2) } }
  :: atomic { aborts & 1 -> d_step { on_abort(0) } }
  :: atomic { aborts & 2 -> d_step { on_abort(1) } }
  :: atomic { aborts & 4 -> d_step { on_abort(2) } }
  /* ACKs, and those that end an engagement */
  :: atomic {
       acks[1] + acks[2] + acks[3] + acks[5] + acks[6] + acks[7] != 0 ->
       if :: acks[1] -> l = 1 :: acks[2] -> l = 2 :: acks[3] -> l = 3 :: acks[5] -> l = 5 :: acks[6] -> l = 6 :: acks[7] -> l = 7 fi;
       d_step {
         w = l % W;
         if :: running(w) -> take_ack(w, l / W, acks[l], 0); acks[l] = 0; advance(w) :: else -> acks[l] = 0 fi;
         w = 0;
         l = 0
       }
     }
  :: atomic {
       last_ack_count[1] + last_ack_count[2] + last_ack_count[3] + last_ack_count[5] + last_ack_count[6] + last_ack_count[7] != 0 ->
       if
       :: last_ack_count[1] -> l = 1 :: last_ack_count[2] -> l = 2 :: last_ack_count[3] -> l = 3
       :: last_ack_count[5] -> l = 5 :: last_ack_count[6] -> l = 6 :: last_ack_count[7] -> l = 7
       fi;
       d_step {
         w = l % W;
         if
         :: running(w) ->
            take_ack(w, l / W, last_ack_count[l], last_ack_names[l]);
#ifdef SETTLES
            below[w] = below[w] + last_ack_missing[l];
#endif
            forget_answer(l);
            advance(w)
         :: else -> forget_answer(l)
         fi;
         w = 0;
         l = 0
       }
     }
  /* The strand: takes its deliveries, runs a node, sends gradients, becomes quiet. */
  :: atomic { alive_open(0) && fresh[0] -> fresh[0] = false }
  :: atomic { alive_open(1) && fresh[1] -> fresh[1] = false }
  :: atomic { alive_open(2) && fresh[2] -> fresh[2] = false }
  :: atomic {
       ready(0) || ready(1) || ready(2) || ready(3) || ready(4) ->
       if :: ready(0) -> l = 0 :: ready(1) -> l = 1 :: ready(2) -> l = 2 :: ready(3) -> l = 3 :: ready(4) -> l = 4 fi;
       d_step {
         assert(used & bit(l));
         ran = ran | bit(l);
#ifdef RETURNS
         if
         :: knows_next(R[l], S[l]) -> fail(R[l]) /* the tensors are of the former life */
         :: else -> outbox = outbox | bit(l)
         fi;
#else
         outbox = outbox | bit(l);
#endif
         l = 0
       }
     }
  :: atomic {
       sendable(0) || sendable(1) || sendable(2) || sendable(3) || sendable(4) ->
       if :: sendable(0) -> l = 0 :: sendable(1) -> l = 1 :: sendable(2) -> l = 2 :: sendable(3) -> l = 3 :: sendable(4) -> l = 4 fi;
       d_step {
         go = !fresh[R[l]] && !any_ready(R[l]) && outbox_of(R[l]) == bit(l);
#ifndef BROKEN_ENDS_WITH_A_DEFICIT
         go = go && deficit[R[l]] == 0;
#endif
#ifdef BROKEN_ENDS_BEFORE_ITS_LAST_NODE
         go = deficit[R[l]] == 0;
#endif
         send_gradients(l, true);
         go = false;
         l = 0
       }
     }
  :: atomic { alive_open(0) && !fresh[0] && !quiet[0] && !any_ready(0) && outbox_of(0) == 0 -> d_step { become_quiet(0) } }
  :: atomic { alive_open(1) && !fresh[1] && !quiet[1] && !any_ready(1) && outbox_of(1) == 0 -> d_step { become_quiet(1) } }
  :: atomic { alive_open(2) && !fresh[2] && !quiet[2] && !any_ready(2) && outbox_of(2) == 0 -> d_step { become_quiet(2) } }
#ifdef ABORTS
  :: atomic { !aborted && alive_open(0) -> d_step { aborted = true; fail(0) } }
  :: atomic { !aborted && alive_open(1) -> d_step { aborted = true; fail(1) } }
  :: atomic { !aborted && alive_open(2) -> d_step { aborted = true; fail(2) } }
#endif
#ifdef CRASHES
  :: atomic { !crashed -> if :: victim = 0 :: victim = 1 :: victim = 2 fi; d_step { w = victim; victim = 0; crash(w); w = 0 } }
  :: atomic {
       losses != 0 ->
       if :: losses & 1 -> l = 0 :: losses & 2 -> l = 1 :: losses & 4 -> l = 2 fi;
       if :: d_step { drop_unread(l) } :: skip fi;
       d_step { notice(l); l = 0 }
     }
#endif
#ifdef RETURNS
  :: atomic { crashed && !dead[0] && !(met & 1) -> met = met | 1 }
  :: atomic { crashed && !dead[1] && !(met & 2) -> met = met | 2 }
  :: atomic { crashed && !dead[2] && !(met & 4) -> met = met | 4 }
#endif
#ifdef FORMER
  :: atomic { untold != 0 -> if :: untold & 1 -> l = 0 :: untold & 2 -> l = 1 :: untold & 4 -> l = 2 fi; d_step { hear_of_former(l); l = 0 } }
#endif
  :: else -> break
  od;
  skip; /* no jump into a d_step */
  d_step { check_rest() }
}
