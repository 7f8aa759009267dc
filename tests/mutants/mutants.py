"""Hand mutants: lines of the core that keep a promise to users, each with a change that breaks it.

`python -m tests.mutants` applies one at a time, and shows it to scenarios, tests of the core and seeds of the simulator
until one fails. A mutant that survives stands for a line without a use, or for a promise without a test.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`old` stands exactly once in the core, in whichever file, and becomes `new`. The name says what is broken then."""

    name: str
    old: str
    new: str


MUTANTS = (
    Mutant(
        "the journal does not name a worker that joins",
        "    state.journal.append(Joined(*member.worker, member.session, report.session))\n",
        "",
    ),
    Mutant(
        "a newcomer in the journal takes the place of a worker that may still live",
        "        left = [numbers for numbers in self.sessions.pop(worker, []) if record.session not in numbers]\n",
        "        left = self.sessions.pop(worker, [])[:0]\n",
    ),
    Mutant(
        "a restarted server decides before its workers have heard of it",
        "    if model.awaited and member.report.session == member.session:\n",
        "    if model.awaited:\n",
    ),
    Mutant(
        "ticket numbers start again after a restart",
        "            self.last = max(self.last, *[number for number in told if number <= most], 0)\n",
        "            pass\n",
    ),
    Mutant(
        "a publish of a former session ends well below the newest version",
        "        model.why_late(version, call.epoch)\n        if is_known\n",
        "        None\n        if is_known\n",
    ),
    Mutant(
        "a number that has existed is used again",
        "        if version == self.newest and (record is None or not record.exists or not record.roots):\n",
        "        if False:\n",
    ),
    Mutant(
        "version 0 is not copied before its last holder leaves it",
        "    return offload if offload is not None else _version_to_copy_ahead(model, member)\n",
        "    return offload or _version_to_copy_ahead(model, member)\n",
    ),
    Mutant(
        "a closing worker waits for a spot worker until its deadline",
        "    return all(heir.hello.reliable for heir in heirs) or state.now < awaits_spot_until(state, model, leaver)\n",
        "    return bool(heirs)\n",
    ),
    Mutant(
        "a version is established by its publisher alone",
        "            worker.replica != record.publisher and _has_it_to_stay(",
        "            _has_it_to_stay(",
    ),
    Mutant(
        "the established version is kept by its publisher alone",
        "    return member.worker.replica != record.publisher and member.will_keep(record.version)\n",
        "    return member.will_keep(record.version)\n",
    ),
    Mutant(
        "a buffer is drained right after a restart",
        "    if model.is_listening:\n        return Drained(why",
        "    if model is None:\n        return Drained(why",
    ),
    Mutant(
        '"latest" is answered right after a restart',
        "    if model.is_listening:\n        call.waiting = admission.recovering(state)\n        return\n    missing =",
        "    missing =",
    ),
    Mutant(
        "a publish is granted right after a restart",
        "    if model.is_listening:\n        call.waiting = admission.recovering(state)\n        return\n    if len",
        "    if len",
    ),
    Mutant(
        "a new server forgets the reads that were granted before it",
        "    if reading is not None and model.is_listening and _may_adopt(state, worker, report):\n",
        "    if reading is not None and state is None:\n",
    ),
    Mutant(
        "each shard gets the latest version of its own moment",
        "        epoch = call.epoch if version is not None else Number(0)\n",
        "        epoch = call.epoch if version is not None else Number(0)\n"
        '        call.version = None if call.verb == "update" else call.version\n',
    ),
    Mutant("workers do not report the newest version", "        newest=worker.newest,\n", "        newest=None,\n"),
    Mutant(
        "another replica publishes beside the writer",
        "    conflict = admission.why_not_writer(state, model, replica)\n",
        "    conflict = None\n",
    ),
    Mutant(
        "of two publishes of one number the one that is heard first counts",
        "        if (not is_pending, epoch) <= (record.exists, record.epoch):\n",
        "        if (not is_pending) <= record.exists and record.epoch:\n",
    ),
    Mutant(
        "a publish that has not ended well on all shards makes a version",
        "        if not is_pending:\n            model.note_exists(record)\n",
        "        model.note_exists(record)\n",
    ),
    Mutant(
        "a journal is believed though a worker has a session that it does not know",
        "    if not is_stale:\n        return\n",
        "    return\n",
    ),
    Mutant(
        "a silent writer is the writer for ever",
        "    return replica if any(not member.report.closing for member in members) else None\n",
        "    return replica\n",
    ),
    Mutant(
        "a reader stays with a relay that has lost its session",
        "        is_fixed = current.shares or may_come_back\n",
        "        is_fixed = current.shares or current.source not in state.members\n",
    ),
    Mutant(
        "a reader without progress does not read from a source that wants to leave",
        "        and (not candidate.is_withdrawing or (is_lost and candidate.is_full))\n",
        "        and not candidate.is_withdrawing\n",
    ),
    Mutant(
        "after a restart, readers of relays that are not heard yet cross sites again",
        "        is_fixed = current.shares or may_come_back\n",
        "        is_fixed = current.shares\n",
    ),
    Mutant(
        "a call whose read brings nothing is not looked at",
        "            self.mark_dirty(read.reader)  # its call may have no source that brings anything\n",
        "",
    ),
    Mutant(
        "a call for a lost version ends though its source may come back",
        "    if read is not None and not slow.is_cut_off(state, read):\n        return None\n",
        "    if read is not None and not slow.is_still(state, read):\n        return None\n",
    ),
    Mutant(
        "a read across that was opened for earlier tensors fills a host copy",
        "        return may_fetch and not _is_of_other_tensors(worker)\n",
        "        return may_fetch\n",
    ),
    Mutant(
        "tensors that are registered again count no host copy that is there",
        "        self.max_copies = max(min(event.max_copies, MAX_COPIES), self.count)\n",
        "        self.max_copies = min(event.max_copies, MAX_COPIES)\n",
    ),
    Mutant(
        "a call of a restarted job fails because of the processes of the killed one",
        "    others = [state.members.get(replica.members[shard]) for shard in call.arrived if shard in replica.members]\n"
        "    return bool(others)",
        "    others = []\n    return bool(others)",
    ),
    Mutant(
        "a call waits for its deadline when a shard dies",
        "    return bool(others) and all(other is not None and not other.report.ended for other in others)\n",
        "    return True\n",
    ),
    Mutant(
        "a closed ticket is begun",
        "        if grant is not None and grant.ticket <= self.closed:\n            grant = None\n",
        "",
    ),
    Mutant(
        "the lease counts from the answer",
        "        worker.slot.extend_trust(sent_at + orders.trust_s)\n",
        "        worker.slot.extend_trust(worker.now + orders.trust_s)\n",
    ),
    Mutant(
        "a read goes on after the lease",
        "        if now < self.trust_until:\n            return False\n",
        "        if now < self.trust_until + 1e9:\n            return False\n",
    ),
    Mutant(
        '"drained" counts though it was said before the withdrawal',
        "        return 0 < self.withdrawn_in <= self.drained_by\n",
        "        return self.withdrawn_in > 0 and self.drained_by > 0\n",
    ),
    Mutant("orders of a dead server count", "        return acknowledged >= self._since\n", "        return True\n"),
    Mutant(
        "a host copy goes before the server has heard that it will",
        "                self.dropping[copy.version] = Dropping(next_report)\n",
        "                self.dropping[copy.version] = Dropping(0)\n",
    ),
    Mutant(
        "a replica joins with another number of shards",
        "            refusal = admission.why_refuse(state, hello, report)\n",
        "            refusal = None\n",
    ),
    Mutant(
        "after a restart a newcomer takes the place of a worker that lived before",
        "            for newcomer in admission.giving_way(state, hello, report):\n",
        "            for newcomer in list[Member]():\n",
    ),
    Mutant(
        "a call waits for its deadline when a shard dies before it has called",
        '        elif self.call is not None:\n            text = f"shard {shard} of {self.name} {why}',
        "        elif self.call is not None and shard in self.call.arrived:\n"
        '            text = f"shard {shard} of {self.name} {why}',
    ),
    Mutant(
        "a call waits for its deadline for a shard that was never there",
        '    if state.now >= until:\n        text = f"shard {some_shards(absent)}',
        '    if state.now >= until + 1e9:\n        text = f"shard {some_shards(absent)}',
    ),
    Mutant(
        "a call that waits for a shard says nothing", "        worker.want(events.Delayed(call.number or 0, why))\n", ""
    ),
    Mutant(
        "a version is withdrawn before its claim is granted",
        "        return self.number is not None and (self.claim is None or self.resolved is not None)\n",
        "        return self.number is not None\n",
    ),
    Mutant(
        "a call ends with another version than the present server has answered",
        "        if finished == call.number and call.is_inherited and (not call.is_resolved_here or call.version == held):\n",
        "        if finished == call.number and call.is_inherited:\n",
    ),
    Mutant(
        "siblings wait for a shard that could not make the call",
        '            call.arrived.setdefault(shard, Digest(""))\n',
        "",
    ),
    Mutant(
        "an update waits for a host copy that has no memory",
        "            worker.copies.leave(reading.version, next_report=worker.next_report)\n",
        "            pass\n",
    ),
    Mutant(
        "a step begins on shards with different versions",
        "    return taken or _why_spoiled(state, replica) or _why_apart(state, replica)\n",
        "    return taken or _why_spoiled(state, replica)\n",
    ),
    Mutant(
        "a claim is granted to a replica with a poisoned buffer",
        "    return taken or _why_spoiled(state, replica) or _why_apart(state, replica)\n",
        "    return taken or _why_apart(state, replica)\n",
    ),
    Mutant(
        "two reads write at once",
        "        return self.grant is not None and is_wanted and self.reading is None and now < self.trust_until\n",
        "        is_free = self.reading is None or self.is_stopping\n"
        "        return self.grant is not None and is_wanted and is_free and now < self.trust_until\n",
    ),
    Mutant(
        "a failed fill is filled again while it is read",
        "        self._become(trigger, Poisoned(self.serving))\n",
        "        self._become(trigger, Poisoned())\n        self.serving = None\n",
    ),
    Mutant(
        "the buffer is given back while it is read",
        "    if worker.now >= call.impatient_at and (worker.memory.is_stopping or not reads.is_ahead(worker)):\n"
        "        reads.hurry(worker)\n",
        "    if isinstance(worker.buffer, Withdrawing) and worker.now >= call.started + 0.2:\n"
        "        worker.want(worker.memory.stop_serving())\n",
    ),
    Mutant(
        "a read that was taken back counts as closed",
        "        self.reads.take_back(read)\n",
        "        self.reads.take_back(read)\n        self.reads.close(read.reader, read.ticket)\n",
    ),
    Mutant(
        "the end of a source's lease closes the reads from it",
        "    close_reads(state, member, None)\n    model.move",
        "    close_reads(state, member, None)\n"
        "    for read in state.reads.from_source(member.worker):\n"
        "        state.reads.close(read.reader, read.ticket)\n"
        "    model.move",
    ),
    Mutant("a drain waits for a dead reader", "    close_reads(state, member, None)\n    model.move", "    model.move"),
    Mutant("a late report is believed", "        if report.number <= member.report.number:\n", "        if False:\n"),
    Mutant(
        "a call ends before all shards have the version",
        "        if member is None or Shard(shard) not in call.arrived or not _is_in(member, call):\n"
        "            return False\n",
        "        if member is None or Shard(shard) not in call.arrived or not _is_in(member, call):\n"
        "            continue\n",
    ),
    Mutant(
        "a call goes on when a shard is dead",
        '        elif self.call is not None:\n            text = f"shard {shard} of {self.name} {why}',
        '        elif False:\n            text = f"shard {shard} of {self.name} {why}',
    ),
    Mutant(
        "readers wait for each other in a ring",
        "        if member is None or worker in behind:\n            continue\n        for from_host",
        "        if member is None or worker == reader.worker:\n            continue\n        for from_host",
    ),
    Mutant(
        "a lost version is the latest",
        "found = tuple(version for version in existing if not self.is_lost(self.versions[version]))",
        "found = existing",
    ),
    Mutant(
        "the old version is withdrawn before a source of the new one is open",
        " and worker.has_within_reach(version):\n",
        ":\n",
    ),
    Mutant(
        "a withdrawn version that was not overwritten is not restored",
        "    if not isinstance(buffer, Vacated) or worker.slot.may_write:\n",
        "    if True:\n",
    ),
    Mutant(
        "a withdrawn version is restored while a read may still write",
        "    if not isinstance(buffer, Vacated) or worker.slot.may_write:\n",
        "    if not isinstance(buffer, Vacated):\n",
    ),
    Mutant(
        "a worker withdraws its version before its call is resolved",
        "_holds_on(replica, member, buffer.version):\n        buffer = Holding",
        "False:\n        buffer = Holding",
    ),
    Mutant(
        "a worker that withdraws with its call is not told soon that it is drained",
        "            content.judge_withdrawals(state, model, replica)\n",
        "            pass\n",
    ),
    Mutant(
        "the old version is served no more before a source of the new one is open",
        "copying is None and not is_ahead(worker):\n        worker.want(",
        "copying is None:\n        worker.want(",
    ),
    Mutant(
        "a version is withdrawn for one that is not within reach",
        "        case Withdrawing(version=held) if held == version or not _may_come_within_reach(worker, call, version):\n"
        "            hold_on(worker)\n",
        "",
    ),
    Mutant(
        "an update goes back because a shard restores its version",
        "    is_former = told is None or replica.finished < told.number < call.number\n",
        "    is_former = told is None\n",
    ),
    Mutant(
        "a site waits for a seed that cannot begin",
        "    return begins_until(state, read) <= state.now\n",
        "    return False\n",
    ),
    Mutant(
        "a call for a version that was lost is not made again",
        "        return is_lost and self.fills and not isinstance(self.spec, int)\n",
        "        return False\n",
    ),
    Mutant(
        "a worker trusts its lease to the last moment",
        "        return self.lease_s * (1.0 - self.drift)\n",
        "        return self.lease_s * 1.1\n",
    ),
    Mutant(
        "a drained source is granted again",
        "        return not buffer.impatient and not member.may_drop\n",
        "        return not buffer.impatient\n",
    ),
    Mutant(
        "a grant names content that no holder has reported",
        "            see_that_it_begins(state, model, record, member)\n        return\n",
        "            see_that_it_begins(state, model, record, member)\n"
        "        record.roots[member.line] = record.layouts.setdefault(member.line, member.report.layout)\n",
    ),
    Mutant(
        "a released host copy counts again",
        "if copy.version == version and not copy.dropping and copy.number not in self.releasing:\n",
        "if copy.version == version and not copy.dropping:\n",
    ),
    Mutant(
        "a host copy is released while it is read",
        "    return tuple(copy.number for copy in told if not _is_read(state, member, copy))\n",
        "    return tuple(copy.number for copy in told)\n",
    ),
    Mutant(
        "a useless host copy is dropped while it is read",
        "            self.leave(version, next_report=next_report)\n        else:\n",
        "            self.dropping[version] = Dropping(0, is_final=True, is_agreed=True)\n        else:\n",
    ),
    Mutant(
        "a reader stays at a host copy that is about to go",
        "            member.releasing[copy.number] = None\n            for read in",
        "            for read in",
    ),
    Mutant(
        "a closing worker drops its host copies at once",
        "        worker.copies.leave_all(next_report=worker.next_report)\n",
        "        worker.copies.leave_all(next_report=0)\n"
        "        for each in worker.copies.dropping.values():\n"
        "            each.is_agreed = True\n",
    ),
    Mutant(
        "tensors that are registered again drop the last copy of a version",
        "            if copy.layout != layout and not copy.whole:\n",
        "            if copy.layout != layout:\n",
    ),
    Mutant(
        "other tensors are filled from a host copy of the former ones",
        "        return copy.layout != self.layout or self.failed.get(copy.version, 0) >= MAX_TRIES\n",
        "        return self.failed.get(copy.version, 0) >= MAX_TRIES\n",
    ),
    Mutant(
        "a host copy that cannot be made is tried for ever",
        "        return copy.layout != self.layout or self.failed.get(copy.version, 0) >= MAX_TRIES\n",
        "        return copy.layout != self.layout\n",
    ),
    Mutant(
        "tensors are filled from a host copy while they are read",
        "must go first.\n            worker.memory.cut_short(next_report=worker.next_report)\n",
        "must go first.\n            worker.want(worker.memory.stop_serving())\n",
    ),
    Mutant(
        "tensors change while they are copied to host memory",
        "    if worker.memory.is_drained and worker.copies.copying is None and not is_ahead(worker):\n",
        "    if worker.memory.is_drained and not is_ahead(worker):\n",
    ),
    Mutant("sources in other sites are as near as those inside", "        not candidate.is_same_site,\n", ""),
    Mutant(
        "a pause of the server ends leases",
        "        is_pause = late_s > LATE * report_s\n",
        "        is_pause = late_s > 1e9\n",
    ),
    Mutant(
        "all workers of a site read across sites", "    return best is None or best[1] is reader\n", "    return True\n"
    ),
    Mutant(
        "a site waits for a seed that gets nothing",
        "            rank = (member.turns_lost, has_source, -done, member.worker)\n",
        "            rank = (has_source, -done, member.worker)\n",
    ),
    Mutant(
        "a worker that has left begins another session",
        "                if model is not None and report.left:  # it has left, and did not hear that\n",
        "                if False:\n",
    ),
    Mutant(
        "a site waits for a seed that is gone",
        "        if not facts.is_here(state, member):\n            continue\n",
        "",
    ),
    Mutant(
        "a silent worker is granted a read",
        "        if is_here:\n            reads.decide_read(",
        "        if member.is_connected:\n            reads.decide_read(",
    ),
    Mutant(
        "a reader of an abandoned host copy waits for its deadline",
        "            if is_stuck or source.turns_lost > member.turns_lost:",
        "            if source.turns_lost > member.turns_lost:",
    ),
    Mutant(
        "an update goes back because one shard is still filling",
        "    return told is None or told.number < call.number\n",
        "    return False\n",
    ),
    Mutant("sources send to other sites as often as they like", "        candidate.leaving_site,\n", ""),
    Mutant("a source that seems dead is asked first", "        candidate.is_doubtful,\n", ""),
    Mutant(
        "a failed source is offered to the next reader",
        "        source.has_failed_a_reader = True\n",
        "        source.has_failed_a_reader = False\n",
    ),
    Mutant("a source that failed once is avoided for ever", "    member.has_failed_a_reader = False\n", ""),
    Mutant(
        "a call fails though its reads bring chunks",
        "        tries.chunks, tries.failures = reader.chunks_in_place, 0\n",
        "        tries.chunks = reader.chunks_in_place\n",
    ),
    Mutant(
        "a call fails beside a source that was not tried",
        "    return is_enough and not _has_hope(state, model, record, member, is_last=True)\n",
        "    return is_enough\n",
    ),
    Mutant(
        "a reader stays with a source that sends nothing",
        "    if is_still(state, read):\n        return Slow(f",
        "    if False:\n        return Slow(f",
    ),
    Mutant(
        "a reader stays with a source that is far too slow",
        "    if usual is None or pace.rate * TIMES >= usual:\n        return None\n",
        "    return None\n",
    ),
    Mutant(
        "a reader that waits for its source's source is moved",
        "        read.pace.wait(state.now)\n",
        "        pass\n",
    ),
    Mutant(
        "readers go back and forth",
        "    return state.now >= read.began_at + stays_s\n",
        "    return True\n",
    ),
    Mutant(
        "a lone reader stays with a source that is slower than usual",
        "        record.note_rate(tier_of(state, read), reader.worker, reader.report.size_bytes / took_s, MAX_READERS)\n",
        "        pass\n",
    ),
    Mutant(
        "a reader stays behind a source that gets nothing itself",
        "    slow = _by_itself(state, record, feed) if feed.is_stuck else None\n",
        "    slow = None\n",
    ),
    Mutant(
        "a slow relay shares its source with the reader that left it",
        "    if reader is None or reader.avoided.until <= state.now:\n        return None\n",
        "    return None\n",
    ),
    Mutant(
        "a slow reader goes behind another slow one",
        "        if above.is_stuck or _by_itself(state, record, above) is not None:\n            return False\n",
        "",
    ),
    Mutant(
        "a source is avoided for good",
        "    if source.avoided.times and why_slow(state, record, read) is None:\n        source.avoided = Avoided()\n",
        "",
    ),
    Mutant(
        "a slow link with large chunks counts as standing still",
        "        if done > self.done or arrived_bytes >= self._part_bytes + part_bytes:\n",
        "        if done > self.done:\n",
    ),
    Mutant(
        "a byte now and then counts as progress",
        "arrived_bytes >= self._part_bytes + part_bytes:",
        "arrived_bytes > self._part_bytes:",
    ),
    Mutant(
        "the last holder leaves before its promised reader has the version",
        "            if is_reader and not member.holds(record.version):\n                return member.worker\n",
        "            if is_reader and not member.holds(record.version):\n                return False\n",
    ),
    Mutant(
        "nothing is granted while a restarted server listens",
        "wanted_read(state, model, replica, member) if is_here else None",
        "wanted_read(state, model, replica, member) if not state.is_recovering else None",
    ),
    Mutant(
        "a worker does not report that it was told drained",
        "        return self.is_drained or self.report.stops\n",
        "        return self.is_drained\n",
    ),
    Mutant(
        "a reader without a source is not told of a new one",
        "    if wanted is not None and is_looking(state, member, wanted):\n",
        "    if False:\n",
    ),
    Mutant(
        "a drain is not told of a new holder",
        "        found.append(references_of(content.buffer.version, key))\n",
        "        pass\n",
    ),
    Mutant(
        "a call is not told that its version is lost",
        "        found += [loss_of(call.version)] if call.version is not None else [SERVICE]\n",
        "        found += [SERVICE]\n",
    ),
    Mutant(
        "readers stay at a host copy that is not filled further",
        "        is_stuck = is_paused and slow.is_still(state, current)\n",
        "        is_stuck = False\n",
    ),
    Mutant(
        "a read without progress keeps a call for a lost version",
        "    if read is not None and not slow.is_cut_off(state, read):\n        return None\n",
        "    if read is not None:\n        return None\n",
    ),
    Mutant(
        "a silent worker is never looked at",
        "    if member.settled_at != state.happened or model.watches",
        "    if model.watches",
    ),
    Mutant(
        "a source that was left as slow is the first choice",
        "        if not candidate.is_slow and candidate.avoided_until <= state.now\n",
        "        if candidate.avoided_until <= state.now\n",
    ),
    Mutant(
        "an update is resolved before all shards are there",
        "    if missing is not None and not is_known(state, replica, call):\n",
        "    if missing is not None and False:\n",
    ),
    Mutant("wait=True does not wait", " and not (call.waits and may_come(model, call.spec)):\n", ":\n"),
    Mutant(
        "wait=True waits for a number that was passed",
        "    return model.newest is None or model.newest < number\n",
        "    return True\n",
    ),
    Mutant(
        "shards with different wait= are in one call",
        "    return call.verb, call.spec, call.claim, call.waits\n",
        "    return call.verb, call.spec, call.claim\n",
    ),
    Mutant(
        "each worker of a host fetches its own copy",
        "            return True\n    return False\n\n\n# --- What a member waits for",
        "            return False\n    return False\n\n\n# --- What a member waits for",
    ),
    Mutant(
        "workers wait for a fetch of one that fell silent",
        "            state.members.wake(member, min(is_silent_at, state.now + slow.window_s(state)))\n",
        "            pass\n",
    ),
    Mutant(
        "workers share host copies of other hosts",
        "        if (mate.hello.place, mate.hello.site) == (here.place, here.site):\n",
        "        if mate.hello.site == here.site:\n",
    ),
    Mutant(
        "host copies are shared across sites",
        "        if (mate.hello.place, mate.hello.site) == (here.place, here.site):\n",
        "        if mate.hello.place == here.place:\n",
    ),
    Mutant(
        "shared memory counts at each worker",
        "        self.mapped[version], self.sizes[version] = size_bytes, 0\n",
        "        self.mapped[version], self.sizes[version] = size_bytes, size_bytes\n",
    ),
    Mutant(
        "shared memory counts nowhere after its owner has gone",
        "        self.sizes[version] = self.mapped[version]\n",
        "        pass\n",
    ),
    Mutant(
        "shards publish different descriptions of one version",
        "        return _said_of(self) == _said_of(reported) and self.metadata == reported.metadata\n",
        "        return _said_of(self) == _said_of(reported)\n",
    ),
    Mutant(
        "a call that follows a sibling's failure fails as well",
        "        instead = self._instead(reported) if reported.resolved is None else 0\n",
        "        instead = 0\n",
    ),
    Mutant(
        "a late shard joins the call that its siblings are in",
        "        return current.number if current.is_same(reported) else 0\n",
        "        return current.number\n",
    ),
    Mutant(
        "a mismatch is final before a late failure is heard",
        "    if not arrived or not differing:\n        return None\n",
        "",
    ),
    Mutant(
        "a restarted shard gets a mismatch",
        "    if all(member.report.ended == call.number - 1 for member in (*arrived, *differing)):\n",
        "    if True:\n",
    ),
    Mutant(
        "a source that is read across cannot cut its readers off",
        "    elif not is_served or (is_without_bytes",
        "    elif (is_without_bytes",
    ),
    Mutant(
        "a replica without all tiles counts as whole",
        "        if layout_set not in self.layout_sets and not any(is_partial(key.layout) for key in layout_set):\n",
        "        if layout_set not in self.layout_sets:\n",
    ),
    Mutant(
        "content without tile digests is read across",
        '    return key.is_boxed and is_tiled(record.roots.get(key, Digest("")))\n',
        "    return key.is_boxed\n",
    ),
    Mutant(
        "the source that failed a read across is not named",
        "        source = source or reading.sources[0].worker\n",
        "        source = reading.sources[0].worker\n",
    ),
    Mutant(
        "an update that is made again goes back",
        "    if floor is None or version >= floor:\n"
        "        return version, None\n"
        "    newer = [each for each in model.available()",
        "    if True:\n        return version, None\n    newer = [each for each in model.available()",
    ),
    Mutant(
        "the established version is dropped while its holders are away",
        "        for version in established:  # a version",
        "        for version in ([newest_established] if newest_established is not None else []):  # what",
    ),
    Mutant(
        "a lost claim is not judged again",
        "    elif call.claim is not None and call.waiting is None and not call.is_resolved_here:\n",
        "    elif call.claim is not None and call.waiting is None and False:\n",
    ),
    Mutant("a failed fill is taken back while it is read", " or facts.is_read_though_poisoned(buffer)", ""),
    Mutant(
        "a version in another layout does not count as kept",
        "        if all(any(counts(state.known(worker)) for worker in record.whole[each]) for each in layout_set):\n"
        "            return True\n"
        "    return False\n"
        "\n"
        "\n"
        "def has_company",
        "        if all(any(counts(state.known(worker)) for worker in record.whole[each]) for each in layout_set):\n"
        "            return False\n"
        "    return False\n"
        "\n"
        "\n"
        "def has_company",
    ),
    Mutant(
        "a read across stays at a source that leaves",
        '        return leaving, f"; {leaving[0].worker.replica} leaves it"\n',
        "        return None\n",
    ),
    Mutant(
        "a version is lost though another layout has it",
        "        return all(any(not record.whole.get(key) for key in layout_set) for layout_set in self.known_layout_sets())\n",
        "        return any(any(not record.whole.get(key) for key in layout_set) for layout_set in self.known_layout_sets())\n",
    ),
    Mutant(
        "a reader in the same site reads across as well",
        "    if is_its_turn and (read.grant.to_host or not isinstance(buffer, Holding | Withdrawing)):\n",
        "    if is_its_turn:\n",
    ),
    Mutant(
        "the last reliable holder withdraws without a host copy",
        "    if _has_room(member, record.version) or _makes_room(state, member):\n        return True\n",
        "",
    ),
    Mutant(
        "spot workers count for retention",
        "    needs_reliable = leaver.hello.reliable and not _is_left_to_spot(state, model, record, leaver)\n",
        "    needs_reliable = False\n",
    ),
    Mutant(
        "closing workers rely on each other",
        "        if other is leaver or other.report.closing or (needs_reliable and not other.hello.reliable):\n",
        "        if other is leaver or (needs_reliable and not other.hello.reliable):\n",
    ),
    Mutant(
        "the newest established version is dropped",
        "            outliving[version] = None\n",
        "",
    ),
    Mutant(
        "a version is established by a worker that wants to leave it",
        "    return member.will_hold(version) or member.has_whole_copy(version)\n\n\ndef _is_to_be_kept",
        "    return member.holds(version) or member.has_whole_copy(version)\n\n\ndef _is_to_be_kept",
    ),
    Mutant(
        "workers that leave a version together rely on each other",
        "        is_before = leaver.report.closing or _rank(other, version) < rank\n",
        "        is_before = True\n",
    ),
    Mutant(
        "each replica copies the established version",
        "        if _keeper(state, record, leaver) is not leaver:\n            return True\n",
        "",
    ),
    Mutant(
        "readers wait behind a worker that has to copy what it holds first",
        "    if not has_all and (not is_filling or is_late):\n",
        "    if not has_all and not is_filling:\n",
    ),
    Mutant(
        "without room for copies all replicas leave the established version at once",
        " or _is_another_on_its_way(state, model, member, record)\n",
        "\n",
    ),
    Mutant(
        "two replicas of different layouts wait for each other",
        " and not replica.missing() and not waits:\n",
        " and not replica.missing():\n",
    ),
    Mutant(
        "a trainer without room waits for a shard that has died",
        "    if not layouts.is_whole(state, model, record):\n        return False\n    return _insists",
        "    return _insists",
    ),
    Mutant(
        "a trainer loses its version where there is no room for a copy",
        "    return _insists(state, model, member, record.version) or _is",
        "    return _is",
    ),
    Mutant(
        "a closing worker leaves before another one has its version",
        "        return not buffer.impatient and _awaits_heirs(state, model, record, member)\n",
        "        return False\n",
    ),
    Mutant(
        "a closing worker waits for one that cannot read",
        "    return member.turns_lost, not member.hello.reliable, not _gets_it",
        "    return not member.hello.reliable, not _gets_it",
    ),
    Mutant(
        "a publisher takes over the established version of a closing worker",
        "    if not _is_to_be_kept(model, member, record.version):\n        return False\n    if _has_it_to_stay",
        "    if _has_it_to_stay",
    ),
    Mutant(
        "workers of another layout never take over a closing worker's version",
        "    for layout_set in model.layout_sets if layouts.is_readable(record, key) else ():\n        found = _heirs_in",
        "    for layout_set in ():\n        found = _heirs_in",
    ),
    Mutant(
        "a host copy is made ahead though other reliable workers may have the version",
        " or layouts.has_company(model, member):\n",
        ":\n",
    ),
    Mutant(
        "a trainer overwrites what a reader may still trust",
        "        return self.heard_at + self.patience_s if self.may_work_alone else inf\n",
        "        return self.heard_at + self.patience_s / 2 if self.may_work_alone else inf\n",
    ),
    Mutant(
        "a process that stood still takes the server for gone",
        "            worker.heard_at += late_s",
        "            worker.heard_at += 0.0",
    ),
    Mutant(
        "one shard waits for ever in a call that another has ended without the server",
        "    return come if is_behind else None\n",
        "    return None\n",
    ),
    Mutant(
        "a shard skips a step for which a sibling waits with the server",
        " or (may_be_there and replica.is_there(call, come.place)):\n",
        ":\n",
    ),
    Mutant(
        "what one shard has published alone stays, though another replica has that number",
        "        taken = model.conflict(replica, Version(int(call.spec)), roots)\n",
        "        taken = None\n",
    ),
    Mutant(
        "shards keep different versions without the server",
        " or (worker.finished == worker.ended and call.resolved in (None, call.floor))\n",
        " or worker.finished == worker.ended\n",
    ),
    Mutant(
        "what was published alone is still held when it is refused",
        '        if why.code == "version-conflict" and isinstance(buffer, Holding) and buffer.version == version:\n',
        "        if False:\n",
    ),
)
