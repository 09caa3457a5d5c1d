/* The ends of workers that hold a remote object (rref/lifetime/PROTOCOL.md, sections 4 and 5): worker 0 owns an object that
   is there from the start, and lends it; those that it is lent to lend it on, drop it, register, end. Where rref.pml has
   creations and every route of a reference, this has several ends: two of them, leaving, a life that comes after another
   one, the end of the owner, a lost link. The reference is sent up to M times. Messages arrive in any order; ledgers apply
   their operations once and in order (G4, taken for granted).

   -DENDS=mask     these workers (bits) end at some time, in any order; others hear of each end at different times
   -DLEAVES=x      worker x, which ENDS names, leaves: it lets go of everything before it ends
   -DRETURNS       worker 3 is the next life of worker 1: it joins when all have heard of the end of the former one
   -DLATECOMER     with it: worker 2 joins after worker 3, and never hears of worker 1
   -DJOINS=x       worker x joins: the owner knows it, the others hear of it at some time, before they get anything of it
   -DLOSES=x       worker x and the owner may lose each other for good before worker x ends
   -DLATE          messages of workers that are over may be handled after the news of the end
   -DCHAIN         worker x sends to worker x + 1 only; else to every worker with a higher number
   -DHANDS_ON      likewise, only once, and without keeping a handle
   Broken variants, each of which the verifier must refuse: see the macros BROKEN_... below and CMakeLists.txt. */

#ifndef M
#define M 3
#endif
#ifndef WORKERS
#define WORKERS 4
#endif
#ifndef ENDS
#define ENDS 0
#endif

#define bit(x) (1 << (x))

/* Holds. */
#define NO_HOLD 0
#define BORROWED 1
#define REGISTERING 2
#define REGISTERED 3
#define LOST 4
byte hold[WORKERS];
byte handles[WORKERS];    /* at the owner, too */
bool gone;                /* the object has been destroyed */
bool holds_it[WORKERS];   /* holders */

/* Messages that carry the reference, and their tokens. The sender's pin lasts until SETTLED. */
#define UNSENT 0
#define FLYING 1
#define CREDITOR 2
#define SETTLING 3
#define SETTLED 4
byte from[M], to[M], token[M];
byte sent;

mtype = { REG, DROP, SETTLE, SWEEP, CLEAN, ASK, SWEPT };
/* Ledgers, by sender and receiver: WORKERS * sender + receiver. */
chan ledger[WORKERS * WORKERS] = [8] of { mtype, byte };
bool ack_flies[WORKERS];

/* Ends. */
byte ended;          /* bits of the lives that have ended */
byte knows[WORKERS]; /* of which ends each has heard */
byte asked_early[WORKERS];
bool joined, leaving, cut;

/* Sweeps, at the owner: by the life that is over. */
#define WAITING 0
#define RUNNING 1
#define IS_SWEPT 2
byte sweep[WORKERS], asked[WORKERS], wanted[WORKERS];
byte i, m, h, d;

#define is_over(x) ((ended & bit(x)) != 0)
#define has_heard(y, x) ((knows[y] & bit(x)) != 0)
#ifdef LATECOMER
#define present(x) ((x) != 3 && (x) != 2 || (x) == 3 && joined || (x) == 2 && joined_late)
bool joined_late;
#elif defined(RETURNS)
#define present(x) ((x) != 3 || joined)
#else
#define present(x) true
#endif
#ifdef LOSES
#define is_cut(x, y) (cut && ((x) == 0 && (y) == LOSES || (y) == 0 && (x) == LOSES))
#else
#define is_cut(x, y) false
#endif
#ifdef JOINS
byte met = 1 | bit(JOINS); /* who knows worker JOINS */
#define knows_of(y, x) ((x) != JOINS || (met & bit(y)) != 0)
#else
#define knows_of(y, x) true
#endif
/* A life before the one that y knows: y will never hear of it. */
#ifdef LATECOMER
#define is_past(y, x) ((y) == 2 && (x) == 1)
#else
#define is_past(y, x) false
#endif
/* What y can no longer reach, or be reached by. */
#define apart(x, y) (is_over(x) || is_over(y) || is_cut(x, y))
#ifdef LEAVES
#define has_left(x) (leaving && (x) == LEAVES)
#else
#define has_left(x) false
#endif
/* The owner is lost to x. */
#define without_owner(x) (has_heard(x, 0) || is_cut(x, 0))

#define pinned(k, x) (k < M && from[k] == x && token[k] != UNSENT && token[k] != SETTLED)
#define pins(x) (pinned(0, x) || (M > 1 && pinned((M > 1 -> 1 : 0), x)) || (M > 2 && pinned((M > 2 -> 2 : 0), x)) || (M > 3 && pinned((M > 3 -> 3 : 0), x)))
#define alive(x) (handles[x] != 0 || pins(x))

/* SETTLE of token k is appended to the receiver's ledger to the sender. */
inline settle(k) {
  token[k] = SETTLING;
  if
  :: !apart(from[k], to[k]) -> ledger[WORKERS * to[k] + from[k]]!SETTLE(k)
  :: else
  fi
}
inline settle_creditors(x) {
  i = 0;
  do
  :: i < M ->
     if :: token[i] == CREDITOR && to[i] == x -> settle(i) :: else fi;
     i++
  :: else -> break
  od;
  i = 0
}
/* A Hold that is not alive ends. What a Lost one was lent is settled when its own pins are gone. */
inline end_hold(x) {
  if
  :: x != 0 && (hold[x] == BORROWED || hold[x] == LOST) && !alive(x) -> settle_creditors(x); hold[x] = NO_HOLD
  :: x != 0 && hold[x] == REGISTERED && !alive(x) -> if :: !apart(x, 0) -> ledger[WORKERS * x]!DROP(x) :: else fi; hold[x] = NO_HOLD
  :: x != 0 && hold[x] == LOST && !pins(x) -> settle_creditors(x)
  :: else
  fi
}

/* A borrow that lasts is registered: tokens of the owner are settled behind it, those of others at its acknowledgement. */
inline register(x) {
  hold[x] = REGISTERING;
  ledger[WORKERS * x]!REG(x);
  i = 0;
  do
  :: i < M -> if :: token[i] == CREDITOR && to[i] == x && from[i] == 0 -> settle(i) :: else fi; i++
  :: else -> break
  od;
  i = 0
}

/* Message k is handled. What a life that is over has sent protects nothing. */
inline receive(k) {
  h = to[k];
  if
  :: has_left(h) -> settle(k)
  :: else ->
     handles[h]++;
     if
     :: hold[h] == NO_HOLD && without_owner(h) -> hold[h] = LOST
#ifndef BROKEN_BORROWS_FROM_THE_DEAD
     :: hold[h] == NO_HOLD && !without_owner(h) && has_heard(h, from[k]) -> hold[h] = LOST
     :: hold[h] == NO_HOLD && !without_owner(h) && !has_heard(h, from[k]) -> hold[h] = BORROWED
#else
     :: hold[h] == NO_HOLD && !without_owner(h) -> hold[h] = BORROWED
#endif
     :: else
     fi;
     if
#ifndef BROKEN_BORROWS_FROM_THE_DEAD
     :: has_heard(h, from[k]) -> token[k] = SETTLED
     :: !has_heard(h, from[k]) && (hold[h] == REGISTERED || hold[h] == LOST) -> settle(k)
#else
     :: hold[h] == REGISTERED || hold[h] == LOST -> settle(k)
#endif
     :: else -> token[k] = CREDITOR
     fi
  fi;
  h = 0
}

/* Pins of worker x towards life y go. */
#ifdef BROKEN_PINS_GO_BY_WORKER
#define same_life(x, y) ((x) == (y) || (x) == 3 && (y) == 1)
#else
#define same_life(x, y) ((x) == (y))
#endif
inline void_pins(x, y) {
  i = 0;
  do
  :: i < M ->
     if :: from[i] == x && same_life(to[i], y) && token[i] != UNSENT -> token[i] = SETTLED :: else fi;
     i++
  :: else -> break
  od;
  i = 0
}

/* The sweeps of all that is over and has not been swept begin: every other life that the owner has not heard the end of is
   asked, also one that it cannot reach. */
inline ask(x) {
  if
  :: present(x) && !has_heard(0, x) ->
     asked[d] = asked[d] | bit(x);
     if :: !apart(0, x) -> ledger[x]!SWEEP(d) :: else fi
  :: else
  fi
}
inline start_sweeps() {
  d = 1;
  do
  :: d < WORKERS ->
     if
     :: has_heard(0, d) && sweep[d] == WAITING -> sweep[d] = RUNNING; ask(1); ask(2); if :: WORKERS > 3 -> ask((WORKERS > 3 -> 3 : 1)) :: else fi
     :: else
     fi;
     d++
  :: else -> break
  od;
  d = 0
}
#define waits_for(x) (sweep[x] == RUNNING && (asked[x] & ~knows[0]) != 0)
#define last_worker (WORKERS > 3 -> 3 : 2)
#ifdef BROKEN_SWEEPS_END_ONE_BY_ONE
#define ends_now(x) (sweep[x] == RUNNING && !waits_for(x))
#elif defined(BROKEN_DROPS_THE_DEAD_AT_ONCE)
#define ends_now(x) (sweep[x] == RUNNING)
#else
#define ends_now(x) (sweep[x] == RUNNING && h == 0)
#endif
/* Sweeps that run end together. */
inline finish_sweeps() {
  h = (waits_for(1) || waits_for(2) || waits_for(last_worker) -> 1 : 0);
  d = 1;
  do
  :: d < WORKERS ->
     if
     :: ends_now(d) ->
        sweep[d] = IS_SWEPT;
        holds_it[d] = false;
#ifdef BROKEN_DROPS_THE_NEXT_LIFE
        if :: d == 1 -> holds_it[3] = false :: else fi;
#endif
        void_pins(0, d);
        i = 1;
        do
        :: i < WORKERS -> if :: (wanted[d] & bit(i)) != 0 && !apart(0, i) -> ledger[i]!SWEPT(d) :: else fi; i++
        :: else -> break
        od;
        i = 0;
        wanted[d] = 0
     :: else
     fi;
     d++
  :: else -> break
  od;
  d = 0;
  h = 0
}
#define is_running (sweep[1] == RUNNING || sweep[2] == RUNNING || sweep[last_worker] == RUNNING)
#define is_wanted(x) (has_heard(0, x) && wanted[x] != 0)
#define some_wanted (is_wanted(1) || is_wanted(2) || is_wanted(last_worker))
#define lent (pins(0) || holds_it[1] || holds_it[2] || holds_it[last_worker])

/* Worker y hears that life x is over. */
inline hear(y, x) {
  knows[y] = knows[y] | bit(x);
  if
  :: x == 0 -> /* nothing is left to protect */
#ifdef BROKEN_WAITS_FOR_THE_DEAD_OWNER
     if :: hold[y] == BORROWED || hold[y] == REGISTERED -> hold[y] = LOST :: else fi;
#else
     if :: hold[y] != NO_HOLD -> hold[y] = LOST :: else fi;
#endif
     ack_flies[y] = false;
     settle_creditors(y);
#ifndef BROKEN_KEEPS_PINS_OF_THE_DEAD
     void_pins(y, 1);
     void_pins(y, 2);
     if :: WORKERS > 3 -> void_pins(y, (WORKERS > 3 -> 3 : 1)) :: else fi;
#endif
     end_hold(y)
  :: x != 0 && y != 0 ->
#ifndef BROKEN_CLEAN_WITHOUT_REG
     h = 0;
     i = 0;
     do
     :: i < M -> if :: token[i] == CREDITOR && to[i] == y && from[i] == x -> h = 1 :: else fi; i++
     :: else -> break
     od;
     i = 0;
     if :: h == 1 && hold[y] == BORROWED && !is_over(0) -> register(y) :: else fi;
#endif
     h = 0;
     i = 0;
     do
     :: i < M -> if :: pinned(i, y) && to[i] == x -> h = 1 :: else fi; i++
     :: else -> break
     od;
     i = 0;
#ifdef BROKEN_ASKS_NO_OWNER
     h = 0;
#endif
     if :: h == 1 && !apart(y, 0) -> ledger[WORKERS * y]!ASK(x) :: else fi;
     h = 0;
     if
     :: (asked_early[y] & bit(x)) != 0 && !apart(y, 0) -> ledger[WORKERS * y]!CLEAN(x); asked_early[y] = asked_early[y] & ~bit(x)
     :: else
     fi
  :: else -> /* at the owner */
     if
#ifdef BROKEN_IGNORES_ENDS_DURING_SWEEPS
     :: is_running -> skip
     :: !is_running && (lent || some_wanted) -> start_sweeps()
#else
     :: lent || is_running || some_wanted -> start_sweeps()
#endif
     :: else
     fi;
     finish_sweeps()
  fi
}

/* Worker y applies the next operation of worker x. */
inline apply(x, y) {
  if
  :: ledger[WORKERS * x + y]?[REG, _] ->
     ledger[WORKERS * x + y]?REG, _;
     assert(!gone); /* G3 */
     holds_it[x] = true;
     ack_flies[x] = !apart(x, y)
  :: ledger[WORKERS * x + y]?[DROP, _] -> ledger[WORKERS * x + y]?DROP, _; assert(holds_it[x]); holds_it[x] = false
  :: ledger[WORKERS * x + y]?[SETTLE, _] ->
     ledger[WORKERS * x + y]?SETTLE, m;
     token[m] = SETTLED;
     m = 0;
     end_hold(y)
  :: ledger[WORKERS * x + y]?[SWEEP, _] ->
     ledger[WORKERS * x + y]?SWEEP, m;
     if
     :: has_heard(y, m) -> ledger[WORKERS * y]!CLEAN(m)
#ifdef BROKEN_ANSWERS_FOR_THE_UNKNOWN
     :: !has_heard(y, m) && !knows_of(y, m) -> ledger[WORKERS * y]!CLEAN(m)
#endif
#ifndef BROKEN_WAITS_FOR_NEWS_OF_THE_PAST
     :: !has_heard(y, m) && is_past(y, m) -> ledger[WORKERS * y]!CLEAN(m)
#endif
     :: else ->
#ifndef BROKEN_FORGETS_EARLY_QUESTIONS
        asked_early[y] = asked_early[y] | bit(m)
#endif
        skip
     fi;
     m = 0
  :: ledger[WORKERS * x + y]?[CLEAN, _] ->
     ledger[WORKERS * x + y]?CLEAN, m;
     asked[m] = asked[m] & ~bit(x);
     m = 0;
     finish_sweeps()
  :: ledger[WORKERS * x + y]?[ASK, _] ->
     ledger[WORKERS * x + y]?ASK, m;
     if
     :: sweep[m] == IS_SWEPT -> if :: !apart(x, y) -> ledger[x]!SWEPT(m) :: else fi
     :: else ->
        wanted[m] = wanted[m] | bit(x);
        if :: has_heard(0, m) -> start_sweeps(); finish_sweeps() :: else fi
     fi;
     m = 0
  :: ledger[WORKERS * x + y]?[SWEPT, _] ->
     ledger[WORKERS * x + y]?SWEPT, m;
#ifndef BROKEN_KEEPS_PINS_TOWARDS_THE_SWEPT
     void_pins(y, m);
#endif
     m = 0;
     end_hold(y)
  fi
}

#define deliverable(k) (token[k] == FLYING && !is_over(to[k]) && !has_heard(to[k], from[k]) && !is_cut(from[k], to[k]))
#ifdef LATE
#define can_receive(k) (token[k] == FLYING && !is_over(to[k]) && !is_cut(from[k], to[k]))
#else
#define can_receive(k) (deliverable(k) && knows_of(to[k], from[k]))
#endif

inline destroy() {
  assert(!gone);
  gone = true;
  /* G2: no handle and no message has it any more. */
  i = 1;
  do
  :: i < WORKERS -> assert(is_over(i) || handles[i] == 0 || hold[i] == LOST); i++
  :: else -> break
  od;
  i = 0;
  do
  :: i < M -> assert(!deliverable(i) || without_owner(to[i])); i++
  :: else -> break
  od;
  i = 0
}

inline send_reference(x, y) {
  from[sent] = x;
  to[sent] = y;
  token[sent] = FLYING;
  sent++;
#ifdef HANDS_ON
  handles[x]--;
#endif
  skip
}

#ifdef HANDS_ON
#define route(x, y) ((y) == (x) + 1 && sent == (x))
#elif defined(CHAIN)
#define route(x, y) ((y) == (x) + 1)
#else
#define route(x, y) true
#endif
#define can_send(x, y) (route(x, y) && sent < M && handles[x] != 0 && hold[x] != LOST && !is_over(x) && !has_heard(x, y) && present(y) && !is_past(x, y) && knows_of(x, y) && !is_cut(x, y))
#ifdef BROKEN_APPLIES_LEDGERS_OF_THE_DEAD
#define can_apply(x, y) (nempty(ledger[WORKERS * x + y]) && !is_over(y) && !is_cut(x, y))
#else
#define can_apply(x, y) (nempty(ledger[WORKERS * x + y]) && !is_over(y) && !has_heard(y, x) && knows_of(y, x) && !is_cut(x, y))
#endif
#define can_end(x) ((ENDS & bit(x)) != 0 && !is_over(x) && present(x))
#define can_hear(y, x) (is_over(x) && !is_over(y) && present(y) && !has_heard(y, x) && knows_of(y, x) && !is_past(y, x))

#ifdef LEAVES
inline leave() {
  leaving = true;
  handles[LEAVES] = 0;
#ifdef BROKEN_A_LEAVER_SETTLES_WHAT_IT_LENT
  settle_creditors(LEAVES);
#endif
  end_hold(LEAVES)
}
#define may_end(x) ((x) != LEAVES || leaving)
#else
#define may_end(x) true
#endif

#ifdef LOSES
inline lose_the_owner() {
  cut = true;
  ack_flies[LOSES] = false;
  if
  :: hold[LOSES] != NO_HOLD ->
     hold[LOSES] = LOST;
#ifdef BROKEN_SETTLES_WHAT_IT_LENT_WHEN_LOST
     settle_creditors(LOSES);
#endif
     end_hold(LOSES)
  :: else
  fi
}
#endif

#ifdef RETURNS
/* All have heard of the end of worker 1. */
#define all_have_heard (is_over(1) && (is_over(0) || has_heard(0, 1)) && (is_over(2) || !present(2) || has_heard(2, 1)))
/* Sweeps that run ask those that join, too. */
inline ask_newcomer(x) {
  d = 1;
  do
  :: d < WORKERS -> if :: sweep[d] == RUNNING -> asked[d] = asked[d] | bit(x); ledger[x]!SWEEP(d) :: else fi; d++
  :: else -> break
  od;
  d = 0
}
inline join() {
  joined = true;
  knows[3] = knows[0];
  ask_newcomer(3)
}
#endif
#ifdef LATECOMER
inline join_late() {
  joined_late = true;
  knows[2] = knows[0] & ~bit(1);
  ask_newcomer(2)
}
#endif

inline check_rest() {
  assert(is_over(0) || gone); /* G5, G7 */
  i = 0;
  do
  :: i < WORKERS -> assert(is_over(i) || (hold[i] == NO_HOLD && handles[i] == 0)); i++
  :: else -> break
  od;
  i = 0;
  do
  :: i < M -> assert(token[i] == UNSENT || token[i] == SETTLED || is_over(from[i])); i++
  :: else -> break
  od;
  i = 0
}

#define SENDS(x, y) :: atomic { can_send(x, y) -> d_step { send_reference(x, y) } }
#define DROPS(x) :: atomic { handles[x] != 0 && !is_over(x) -> d_step { handles[x]--; end_hold(x) } }
#define RECEIVES(k) :: atomic { can_receive(k) -> d_step { receive(k) } }
#define REGISTERS(x) :: atomic { hold[x] == BORROWED && alive(x) && !is_over(x) -> d_step { register(x) } }
#define APPLIES(x, y) :: atomic { can_apply(x, y) -> d_step { apply(x, y) } }
#define IS_REGISTERED(x) :: atomic { ack_flies[x] && !is_over(x) -> d_step { ack_flies[x] = false; if :: hold[x] == REGISTERING -> hold[x] = REGISTERED; settle_creditors(x); end_hold(x) :: else fi } }
#define WORKER_ENDS(x) :: atomic { can_end(x) && may_end(x) -> ended = ended | bit(x) }
#define HEARS(y, x) :: atomic { can_hear(y, x) -> d_step { hear(y, x) } }

init {
  handles[0] = 1;
  do
  SENDS(0, 1)
  SENDS(0, 2)
  SENDS(1, 2)
  DROPS(0)
  DROPS(1)
  DROPS(2)
  RECEIVES(0)
  RECEIVES(1)
#if M > 2
  RECEIVES(2)
#endif
#if M > 3
  RECEIVES(3)
#endif
  REGISTERS(1)
  REGISTERS(2)
  APPLIES(0, 1)
  APPLIES(0, 2)
  APPLIES(1, 0)
  APPLIES(1, 2)
  APPLIES(2, 0)
  APPLIES(2, 1)
  IS_REGISTERED(1)
  IS_REGISTERED(2)
#if WORKERS > 3
  SENDS(0, 3)
  SENDS(1, 3)
  SENDS(2, 3)
  DROPS(3)
  REGISTERS(3)
  APPLIES(0, 3)
  APPLIES(1, 3)
  APPLIES(2, 3)
  APPLIES(3, 0)
  APPLIES(3, 1)
  APPLIES(3, 2)
  IS_REGISTERED(3)
#endif
  :: atomic { !gone && !is_over(0) && handles[0] == 0 && !lent -> d_step { destroy() } }
  /* Ends. */
#if (ENDS & 1)
  WORKER_ENDS(0)
  HEARS(1, 0)
  HEARS(2, 0)
#if WORKERS > 3
  HEARS(3, 0)
#endif
#endif
#if (ENDS & 2)
  WORKER_ENDS(1)
  HEARS(0, 1)
  HEARS(2, 1)
#if WORKERS > 3
  HEARS(3, 1)
#endif
#endif
#if (ENDS & 4)
  WORKER_ENDS(2)
  HEARS(0, 2)
  HEARS(1, 2)
#if WORKERS > 3
  HEARS(3, 2)
#endif
#endif
#if (ENDS & 8)
  WORKER_ENDS(3)
  HEARS(0, 3)
  HEARS(1, 3)
  HEARS(2, 3)
#endif
#ifdef LEAVES
  :: atomic { !leaving && !is_over(LEAVES) -> d_step { leave() } }
#endif
#ifdef LOSES
  :: atomic { !cut && !is_over(LOSES) && !is_over(0) -> d_step { lose_the_owner() } }
#endif
#ifdef RETURNS
  :: atomic { !joined && all_have_heard -> d_step { join() } }
#endif
#ifdef LATECOMER
  :: atomic { joined && !joined_late && !is_over(0) -> d_step { join_late() } }
#endif
#ifdef JOINS
  :: atomic { !(met & 2) && !is_over(1) -> met = met | 2 }
  :: atomic { !(met & 4) && !is_over(2) -> met = met | 4 }
#if WORKERS > 3
  :: atomic { !(met & 8) && !is_over(3) -> met = met | 8 }
#endif
#endif
  :: else -> break
  od;
  skip; /* no jump into a d_step */
  d_step { check_rest() }
}
