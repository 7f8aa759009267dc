"""Protective lines of the protocol, each with what stands there when it is removed.

A mutant is one replacement in the core. A scenario or a seed must find every one of them: a mutant that survives is a
line that protects nothing, or a judge that does not bite. `python -m tests.mutants` runs them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`old` occurs exactly once in the core, whichever file that is, and becomes `new`."""

    name: str
    old: str
    new: str
    protects: str


MUTANTS = (
    Mutant(
        "a copy is made ahead where there is no room",
        "    return version if member.copy(version) is not None or member.report.copies_left > spare else None\n",
        "    return version\n",
        "what is copied ahead takes only room that is there",
    ),
    Mutant(
        "a copy made ahead stays in the way of an heir",
        "    if len(reliable) > 1 and not member.report.copies_left:\n        return False\n",
        "",
        "who has the last room for copies can be the heir of a reliable worker",
    ),
    Mutant(
        "a copy made ahead stays though others have the version",
        "    return not any(other in whole and other not in model.closing for other in reliable "
        "if other != member.worker)\n",
        "    return True\n",
        "a copy that spares nobody an offload goes",
    ),
    Mutant(
        "a closed ticket may be begun",
        "        if grant is not None and grant.ticket <= self.closed:\n            grant = None\n",
        "",
        "a worker never begins a ticket that it has called closed",
    ),
    Mutant(
        "the lease counts from the answer",
        "        worker.slot.extend_trust(sent_at + orders.trust_s)\n",
        "        worker.slot.extend_trust(worker.now + orders.trust_s)\n",
        "a lease counts from when the acknowledged report was sent",
    ),
    Mutant(
        "reads outlive the lease",
        "        if now < self.trust_until:\n            return False\n",
        "        if now < self.trust_until + 1e9:\n            return False\n",
        "what is read after the own lease ended does not count",
    ),
    Mutant(
        "drained is believed from before the withdrawal",
        "    if worker.memory.is_going(orders.drained) and is_answer and worker.copies.copying is None:",
        "    if worker.memory.is_going(orders.drained) and worker.copies.copying is None:",
        "drained counts only in answer to a report that said so",
    ),
    Mutant(
        "the word of a dead server counts",
        "        return acknowledged >= self._since\n",
        "        return True\n",
        "orders count only if they answer what was said over this connection",
    ),
    Mutant(
        "a release is final at once",
        "                self.leaving[copy.version] = Leaving(next_report)\n",
        "                self.leaving[copy.version] = Leaving(None)\n",
        "a host copy goes only after the server that releases it has heard that it is about to go",
    ),
    Mutant(
        "a copy that nobody releases any more goes all the same",
        "            elif is_released:\n                leaving.is_agreed = True\n",
        "            elif is_released or leaving is not None:\n                leaving.is_agreed = True\n",
        "a server that knows nothing of a release keeps the copy",
    ),
    Mutant(
        "who is let in is asked on the hello only",
        "            refusal = admission.why_refuse(state, hello, report)\n",
        "            refusal = None\n",
        "all who live of a model have one number of shards, whoever said hello when",
    ),
    Mutant(
        "the number of shards is never free",
        "    model.shards = hello.shards  # as of all who live; free when nobody does\n",
        "",
        "when nobody lives, the next job sets the number of shards",
    ),
    Mutant(
        "after a restart somebody new comes before those who lived",
        "            for newcomer in admission.giving_way(state, hello, report):\n",
        "            for newcomer in list[Member]():\n",
        "a newcomer gives way to who lived before the restart",
    ),
    Mutant(
        "only who had come is missed when it dies",
        '        if self.call is not None:\n            text = f"shard {shard} of {self.name} {why}',
        "        if self.call is not None and shard in self.call.arrived:\n"
        '            text = f"shard {shard} of {self.name} {why}',
        "a shard that dies before it comes to a call costs its siblings a lease, not their deadline",
    ),
    Mutant(
        "a shard that was never there is waited for",
        '    if state.now >= until:\n        text = f"shard {some_shards(absent)}',
        '    if state.now >= until + 1e9:\n        text = f"shard {some_shards(absent)}',
        "a shard that nobody has seen costs its siblings a lease, not their deadline",
    ),
    Mutant(
        "who waits for a shard that lives says nothing",
        "        worker.want(events.Delayed(call.number or 0, why))\n",
        "",
        "who waits for long for a shard that lives says so",
    ),
    Mutant(
        "what is claimed is withdrawn before it is granted",
        "        return self.number is not None and (self.claim is None or self.resolved is not None)\n",
        "        return self.number is not None\n",
        "a refused claim has changed nothing",
    ),
    Mutant(
        "a claim binds nobody",
        "    conflict = conflict or claims.conflict_with(state, model, replica, version)\n",
        "",
        "nobody else publishes a number that is claimed",
    ),
    Mutant(
        "a claim is forgotten with the call",
        "    worker.claim = call.claim  #",
        "    worker.claim = None  #",
        "a claim lasts until it is published",
    ),
    Mutant(
        "a claim is judged while others may be unheard",
        "    if waiting is not None:\n        yield Wait(call, waiting)\n        return\n    conflict = claims",
        "    conflict = claims",
        "after a restart nothing is claimed before everybody has told what they have claimed",
    ),
    Mutant(
        "two reads write at once",
        "        return self.grant is not None and is_wanted and self.reading is None and now < self.trust_until\n",
        "        is_free = self.reading is None or self.is_stopping\n"
        "        return self.grant is not None and is_wanted and is_free and now < self.trust_until\n",
        "a new read starts only after the old one has ended",
    ),
    Mutant(
        "a failed fill is refilled while it is read",
        "        self._become(trigger, Poisoned(self.serving))\n",
        "        self._become(trigger, Poisoned())\n        self.serving = None\n",
        "nobody reads a buffer when it changes from one version to another",
    ),
    Mutant(
        "publish while readers of the old version remain",
        "    if worker.now >= call.impatient_at:\n        filling.hurry(worker)\n",
        "    if isinstance(worker.buffer, Withdrawing) and worker.now >= call.started + 0.2:\n"
        "        worker.want(worker.memory.stop_serving())\n",
        "a buffer changes only after the server has said that it is drained",
    ),
    Mutant(
        "workers keep what they know to themselves",
        "        newest=proofs.newest,\n",
        "        newest=None,\n",
        "latest survives a restart of the server",
    ),
    Mutant(
        "drained right after a restart",
        "    if not model.roll.is_over or witness.is_strange(state, member):\n        return Drained()\n",
        "    if witness.is_strange(state, member):\n        return Drained()\n",
        "after a restart nothing is drained while anybody is missing: old reads are unknown",
    ),
    Mutant(
        "latest is answered right after a restart",
        "    return model.roll.is_over and (not",
        "    return (not",
        "after a restart nothing is resolved while anybody is missing: newer versions may be unknown",
    ),
    Mutant(
        "publishing right after a restart",
        "    return witness.why_unwitnessed(model, replica) if model.roll.is_over else _recovering(state)\n",
        "    return witness.why_unwitnessed(model, replica)\n",
        "after a restart nothing is published while anybody is missing: the number may be taken",
    ),
    Mutant(
        "reads of a former life are forgotten",
        "    if reading is not None and not is_known and state.is_recovering and _may_adopt(state, report):\n",
        "    if reading is not None and state is None:\n",
        "reads granted before a restart stay open for their source",
    ),
    Mutant(
        "a read that was taken back counts as closed",
        "    read.is_void = True\n",
        "    read.is_void = True\n    state.reads.close(read.reader, read.ticket)\n",
        "a read is open until its reader says that it is closed",
    ),
    Mutant(
        "the end of a source's lease ends the reads from it",
        "    intake.close_reads(state, member, None)\n    model.move",
        "    intake.close_reads(state, member, None)\n"
        "    for read in state.reads.from_source(member.worker):\n"
        "        state.reads.close(read.reader, read.ticket)\n"
        "    model.move",
        "the end of a source's lease does not end the reads open on it",
    ),
    Mutant(
        "a dead reader is waited for",
        "    intake.close_reads(state, member, None)\n    model.move",
        "    model.move",
        "the end of a reader's lease ends its reads",
    ),
    Mutant(
        "old reports are believed",
        "        if report.number <= member.report.number:\n",
        "        if False:\n",
        "a report that comes late is dropped",
    ),
    Mutant(
        "each shard gets the latest of its own moment",
        "        version = call.version\n        return Answer",
        "        version = call.version\n"
        '        call.version = None if call.verb == "update" else version\n'
        "        return Answer",
        "the first shard to arrive fixes the version for all",
    ),
    Mutant(
        "finished before all shards are",
        "        if member is None or reported is None or reported.number != call.number:\n            return False\n",
        "        if member is None or reported is None or reported.number != call.number:\n            continue\n",
        "a call is finished when every shard of the replica is",
    ),
    Mutant(
        "a member's death is not told",
        '        if self.call is not None:\n            text = f"shard {shard} of {self.name} {why}',
        '        if False:\n            text = f"shard {shard} of {self.name} {why}',
        "a call fails on all shards when one of them dies",
    ),
    Mutant(
        "readers form rings",
        "        if member is None or worker in behind:\n            continue\n        for from_host",
        "        if member is None or worker == reader.worker:\n            continue\n        for from_host",
        "nobody reads from somebody who reads from him",
    ),
    Mutant(
        "numbers may go back",
        "    conflict = model.conflict(replica, version, call.arrived)\n",
        "    conflict = None\n",
        "a lower number, or the same with other content, is refused",
    ),
    Mutant(
        "numbers begin anew after a restart",
        "        self.last = max(self.last, *(number for number in told if self.is_ours(number)), 0)\n",
        "",
        "numbers rise over the lives of the server",
    ),
    Mutant(
        "what is lost is the latest all the same",
        "available = tuple(version for version in existing if not self.is_lost(self.versions[version]))",
        "available = tuple(existing)",
        "nobody waits for what nobody can have any more",
    ),
    Mutant(
        "the old version is withdrawn before the new one is within reach",
        "        case Holding(version=held) if held != version and worker.has_within_reach(version):\n",
        "        case Holding(version=held) if held != version:\n",
        "a version is not given up for one that may not come",
    ),
    Mutant(
        "what was vacated is never had back",
        "    if not isinstance(buffer, Vacated) or worker.slot.may_write:\n",
        "    if True:\n",
        "a call that fails before it has written anything leaves the old version",
    ),
    Mutant(
        "what was vacated is had back while a read may still write",
        "    if not isinstance(buffer, Vacated) or worker.slot.may_write:\n",
        "    if not isinstance(buffer, Vacated):\n",
        "a version that is held does not change",
    ),
    Mutant(
        "the newest established version is not kept",
        "        if newest_established is not None:\n            retained[newest_established] = None\n",
        "",
        "the last usable version is never given up for one that may not come",
    ),
    Mutant(
        "what its publisher has makes it established",
        "        if not any(worker in reliable or not needs_reliable for worker in outside):\n",
        "        if not record.whole.get(shard):\n",
        "a version is established outside its publisher only",
    ),
    Mutant(
        "without room it does not leave last",
        "        if has_left or other.is_let_go:\n            return True\n        if other.worker > member.worker:  #",
        "        if False:  #",
        "where there is no room for a copy, one replica leaves the established version last",
    ),
    Mutant(
        "what was lost is not called again",
        "        return is_lost and self.fills and not isinstance(self.spec, int)\n",
        "        return False\n",
        "latest is what is not lost, for a call under way too",
    ),
    Mutant(
        "a spot worker is no heir",
        "    is_staying = member.is_connected and not report.closing\n",
        "    is_staying = member.hello.reliable and member.is_connected and not report.closing\n",
        "a publisher that closes hands on to a spot worker where nobody reliable is there",
    ),
    Mutant(
        "the rest of the lease is trusted in full",
        "        return self.lease_s * (1.0 - self.drift)\n",
        "        return self.lease_s * 1.1\n",
        "a worker's lease ends before the server's, whatever their clocks",
    ),
    Mutant(
        "a drained source is granted again",
        "            return not impatient and not member.is_let_go\n",
        "            return not impatient\n",
        "who was told drained is nobody's source any more",
    ),
    Mutant(
        "content is granted that nobody vouched for",
        "    if member.shard not in record.roots:\n        return  #",
        "    if member.shard not in record.roots:\n"
        "        record.roots[member.shard] = record.layouts.setdefault(member.shard, member.report.layout)  #",
        "a grant names the root that a holder or publisher has reported",
    ),
    Mutant(
        "the last reliable holder just leaves",
        "        return established.is_another_on_its_way(state, model, record, member)\n    return True\n",
        "        return established.is_another_on_its_way(state, model, record, member)\n    return False\n",
        "the last reference of a retained version is offloaded before it leaves",
    ),
    Mutant(
        "spot replicas count",
        "        if member is None or member.report.closing or not (member.hello.reliable or not leaver.hello.reliable):\n",
        "        if member is None or member.report.closing:\n",
        "only reliable workers count for retention",
    ),
    Mutant(
        "who was let go counts as one who keeps it",
        "(isinstance(buffer, Withdrawing) and not self.is_let_go)\n",
        "isinstance(buffer, Withdrawing | Vacated)\n",
        "who closes does not leave a version to one who may give it up",
    ),
    Mutant(
        "what is about to be given up needs no copy",
        "        if member.holds(version) and member.keeps(version):\n",
        "        if member.holds(version):\n",
        "an heir that may give up what its buffer has fetches a copy of it",
    ),
    Mutant(
        "a copy that goes makes no room for its heir",
        "    has_room = report.copies_left > 0 or has_it\n",
        "    has_room = report.copies_left > 0 or member.copy(record.version) is not None\n",
        "who closes waits for an heir that has room as soon as its old copy is gone",
    ),
    Mutant(
        "leavers rely on each other",
        "        if not is_copy and not is_self and is_keeper and comes_first:\n",
        "        if not is_copy and not is_self and is_keeper:\n",
        "of several that leave together, one keeps the version",
    ),
    Mutant(
        "a copy that was released counts again",
        "if copy.version == version and not copy.leaving and copy.number not in self.releasing:\n",
        "if copy.version == version and not copy.leaving:\n",
        "what was once told to go is never relied on",
    ),
    Mutant(
        "copies are released while they are read",
        "        if copy.number in member.releasing and not _is_read(state, member, copy)\n",
        "        if copy.number in member.releasing\n",
        "a host copy goes only when nobody reads it",
    ),
    Mutant(
        "readers are driven from a copy that nobody else needs",
        "    if version == version_to_offload(state, model, member) or _is_read(state, member, copy):\n",
        "    if version == version_to_offload(state, model, member):\n",
        "who reads from a host copy reads on from there",
    ),
    Mutant(
        "a bad copy is dropped at once",
        "            self.leave(version, next_report=next_report)\n        else:\n",
        "            self.leaving[version] = Leaving(0, is_final=True, is_agreed=True)\n        else:\n",
        "what a worker has no use for any more may be read by others",
    ),
    Mutant(
        "a bad copy stays a source",
        "            member.releasing[copy.number] = None\n            for read in",
        "            for read in",
        "who reads a copy that goes is given another source",
    ),
    Mutant(
        "a worker that closes drops its copies at once",
        "        worker.copies.leave_all(next_report=worker.next_report)\n",
        "        worker.copies.leave_all(next_report=0)\n        for each in worker.copies.leaving.values():\n"
        "            each.is_agreed = True\n",
        "copies go only when the server has moved their readers",
    ),
    Mutant(
        "other tensors drop the copies of the former ones",
        "            if copy.layout != layout and not copy.whole:\n",
        "            if copy.layout != layout:\n",
        "the last copy of a version is kept, whatever is registered",
    ),
    Mutant(
        "other tensors are filled from a copy of the former ones",
        "        return copy.layout != self.layout or self.failed.get(copy.version, 0) >= MAX_TRIES\n",
        "        return self.failed.get(copy.version, 0) >= MAX_TRIES\n",
        "a copy fills only the tensors of which it is one",
    ),
    Mutant(
        "copying that fails is tried for ever",
        "        return copy.layout != self.layout or self.failed.get(copy.version, 0) >= MAX_TRIES\n",
        "        return copy.layout != self.layout\n",
        "who cannot copy reads from peers",
    ),
    Mutant(
        "a copy of former tensors counts as one of the present ones",
        "copy.version, copy.root, copy.layout):\n",
        "copy.version, copy.root):\n",
        "a server learns the layout of a version from whoever has it",
    ),
    Mutant(
        "copies are counted, not weighed",
        "        return max(0, min(MAX_COPIES - len(self.by_version), room_bytes // self.size_bytes))\n",
        "        return max(0, self.max_copies - len(self.by_version))\n",
        "copies of larger tensors count as what they are",
    ),
    Mutant(
        "a copy fills tensors behind which others read",
        "must go first.\n            worker.memory.cut_short(next_report=worker.next_report)\n",
        "must go first.\n            worker.want(worker.memory.stop_serving())\n",
        "tensors are drained before they are filled otherwise",
    ),
    Mutant(
        "copies are released right after a restart",
        "    if not model.roll.is_over:\n        return HostCopyOrders()\n",
        "",
        "reads of host copies granted before a restart are unknown to it",
    ),
    Mutant(
        "the tensors change while they are offloaded",
        "    if worker.memory.is_going(orders.drained) and is_answer and worker.copies.copying is None:",
        "    if worker.memory.is_going(orders.drained) and is_answer:",
        "a buffer is free only once its copy is made",
    ),
    Mutant(
        "sites are one",
        "        not candidate.is_same_site,\n",
        "",
        "what a site has is read inside it",
    ),
    Mutant(
        "a pause of the server is time",
        "        is_pause = late_s > LATE * report_s\n",
        "        is_pause = late_s > 1e9\n",
        "a pause of the server lengthens every lease by itself",
    ),
    Mutant(
        "everybody may read across",
        "    return best is None or best[1] == reader.worker\n",
        "    return True\n",
        "only the seed of a site reads across, between two sources too",
    ),
    Mutant(
        "a site waits for a seed that has gone",
        "        if not facts.is_here(state, member):\n            continue\n",
        "",
        "who is dead keeps its site from nothing",
    ),
    Mutant(
        "a site waits for an elected worker that has gone",
        "        if not facts.is_silent(state, other):  #",
        "        if other is not None:  #",
        "who is dead keeps its site from fetching ahead no longer than two reports",
    ),
    Mutant(
        "the dead are elected",
        "    is_staying = facts.is_here(state, member) and not report",
        "    is_staying = not report",
        "who is dead is not elected",
    ),
    Mutant(
        "the silent are given reads",
        "        if facts.is_here(state, member):\n            apply.carry_out(",
        "        if member.is_connected:\n            apply.carry_out(",
        "nobody is given a read that would not hear of it",
    ),
    Mutant(
        "between sites load is the worker's",
        "        candidate.leaving_site,\n",
        "",
        "about one copy of a version leaves each site",
    ),
    Mutant(
        "who reads from afar is moved to whoever is idle",
        "(is_shared and not candidate.leaving_site)",
        "(is_cross_site and not candidate.leaving_site)",
        "about one copy of a version leaves each site",
    ),
    Mutant(
        "the dead are asked first",
        "        candidate.is_doubtful,\n",
        "",
        "who seems to be dead is a source after all others",
    ),
    Mutant(
        "what a reader learned of a source is its own",
        "        source.is_doubted = True\n",
        "        source.is_doubted = False\n",
        "a source that failed one reader comes last for the others, until it is heard",
    ),
    Mutant(
        "one failure is held against a source for good",
        "    member.lease_end, member.is_doubted = max(state.now, arrived) + state.settings.lease_s, False\n",
        "    member.lease_end = max(state.now, arrived) + state.settings.lease_s\n",
        "a source that is heard again is in doubt no more",
    ),
    Mutant(
        "failures count however much was brought",
        "        reader.chunks, reader.failures = reader.chunks_in_place, 0\n",
        "        reader.chunks = reader.chunks_in_place\n",
        "a call goes on as long as its reads bring chunks",
    ),
    Mutant(
        "a call fails beside a source that it has not tried",
        "    is_enough = member.failures > state.settings.most_failures and not _has_hope(state, record, member)\n",
        "    is_enough = member.failures > state.settings.most_failures\n",
        "no call gives up while somebody has the version who was not tried",
    ),
    Mutant(
        "readers are moved to whoever may be dead",
        "        if facts.is_here(state, source):\n            others = [c for c in others if not c.is_doubtful]\n",
        "",
        "a source that leaves keeps its readers until there is one who seems to live",
    ),
    Mutant(
        "who stands still is waited for",
        "    if pace.is_still(state.now, progress.patience_s(state)):\n        return f",
        "    if False:\n        return f",
        "a source by which nothing comes is left",
    ),
    Mutant(
        "who is slow is waited for",
        "    if not is_too_slow(pace, others, times):\n        return None\n",
        "    return None\n",
        "a source that brings less than a third is left",
    ),
    Mutant(
        "who only waits is moved",
        "        if its_own is not None and has_no_more and not is_hopeless:\n            read.pace.wait(now)\n",
        "",
        "who waits for what its source waits for stays",
    ),
    Mutant(
        "what a source had is held against it",
        "    if state.now < pace.waited_at + progress.window_s(state) and not is_hopeless:\n",
        "    if state.now < pace.waited_at and not is_hopeless:\n",
        "a read is no slower than what its source had for it",
    ),
    Mutant(
        "who is slow itself is waited for",
        "        yield CallStuck(read, True)\n",
        "        pass\n",
        "those behind a slow reader look for themselves",
    ),
    Mutant(
        "what was tried in vain is tried by all",
        "        yield ForgetCapacity(source)  #",
        "        pass  #",
        "a publisher that is slow itself is not asked by all",
    ),
    Mutant(
        "a slow source keeps its place",
        "            yield GiveWay(slow, reader.worker)\n",
        "            yield GiveWay(slow, None)\n",
        "who is slow gives way to whom it held up",
    ),
    Mutant(
        "who gets no more stays",
        "            if read.pace.rate < read.must_beat:\n",
        "            if read.pace.rate < 0:\n",
        "a move in vain is undone",
    ),
    Mutant(
        "readers go back and forth",
        "state.now + 2 * progress.window_s(state) * 2.0 ** min(reader.moves, 16))\n",
        "reader.may_move_at)\n",
        "each move waits twice as long as the one before",
    ),
    Mutant(
        "a lone reader has nothing to compare with",
        "        if lately > others:\n",
        "        if lately < 0:\n",
        "a lone reader leaves a source that is far slower than usual",
    ),
    Mutant(
        "each reader of a shared source is owed all of the usual rate",
        "    return lately * (read.pace.rate or 0.0) / total if total else lately\n",
        "    return lately\n",
        "who shares a source with others is not slow for that",
    ),
    Mutant(
        "who has moved once never moves again",
        "        if is_looked_for:\n            yield StayFor(reader, state.now + progress.window_s(state))\n",
        "        yield StayFor(reader, max(reader.may_move_at, state.now + progress.window_s(state)))\n",
        "a reader that got a slow source again leaves that too, later",
    ),
    Mutant(
        "a source that stood still is forgotten",
        "            yield CallSlow(source, state.now + state.settings.leave_s)  # there will",
        "            pass  # there will",
        "the next version is read from another source",
    ),
    Mutant(
        "who waited for a source that is whole by now is slow",
        "    if state.now < pace.waited_at + progress.window_s(state) and not is_hopeless:\n",
        "    if its_own is not None and state.now < pace.waited_at + progress.window_s(state) and not is_hopeless:\n",
        "what came was what the source had",
    ),
    Mutant(
        "only whole chunks are progress",
        "        if done > self.done or arrived_bytes >= self._part_bytes + part_bytes:\n",
        "        if done > self.done:\n",
        "a slow link with large chunks does not stand still",
    ),
    Mutant(
        "any byte is progress",
        "arrived_bytes >= self._part_bytes + part_bytes:",
        "arrived_bytes > self._part_bytes:",
        "a byte now and then is nothing",
    ),
    Mutant(
        "who was promised a version is not waited for",
        "        if not member.holds(record.version):\n            return True\n    return False\n",
        "        if not member.holds(record.version):\n            return False\n    return False\n",
        "the last holder stays until whoever was promised the version has it",
    ),
    Mutant(
        "no grants during recovery",
        "wanted_read(state, model, replica, member) if facts.is_here(state, member) else None",
        "wanted_read(state, model, replica, member) if not state.is_recovering else None",
        "transfers go on while a server that has restarted listens",
    ),
    Mutant(
        "who leaves last keeps its readers from a source that is leaving",
        "        others = [c for c in sources.candidates(state, model, record, member) if waits_for_us or not c.is_withdrawing]\n",
        "        others = [c for c in sources.candidates(state, model, record, member) if not c.is_withdrawing]\n",
        "nobody reads for ever at who waits for that very reader",
    ),
    Mutant(
        "a grant needs no witness",
        "        return found if reader.worker in model.roll.witnessed else []\n",
        "        return found\n",
        "who is granted a read is known to somebody whom the next life of the server hears",
    ),
    Mutant(
        "a publish needs no witness",
        "        if worker in model.roll.unwitnessed:\n            return Failure",
        "        if False:\n            return Failure",
        "who has published a number is known to somebody whom the next life of the server hears",
    ),
    Mutant(
        "who has no witness is one",
        "    elif told is not None and told.number > roll.upto and member.worker in roll.witnessed:\n",
        "    elif told is not None and told.number > roll.upto:\n",
        "two newcomers who know of each other only are known to nobody",
    ),
    Mutant(
        "a witness need not prove what it says",
        "        for worker in roll.witness(told.number) if _is_proved(state, model, told) else ():\n",
        "        for worker in roll.witness(told.number):\n",
        "an odd number makes nobody known",
    ),
    Mutant(
        "a witness of a former session counts",
        "    if member.report.session != member.session:\n        return  # it has not heard",
        "    if False:\n        return  # it has not heard",
        "what was told in a former session says nothing of those that began since; who shows it has not heard this life",
    ),
    Mutant(
        "a roster need not be proved",
        "    if roll.is_over or told is None or not _is_proved(state, model, told):\n",
        "    if roll.is_over or told is None:\n",
        "no worker can end a roll call by what it says itself",
    ),
    Mutant(
        "the newest roster is not looked for",
        "    if roll.shown is None or told.number > roll.shown.number:\n",
        "    if roll.shown is None:\n",
        "of several rosters the newest says who is missing",
    ),
    Mutant(
        "as many are enough, whoever they are",
        "        return (self.count, self.digest) == (roster.count, roster.digest)\n",
        "        return self.count == roster.count\n",
        "who was given up and is back does not stand in for who is missing",
    ),
    Mutant(
        "the roll call is over before all have heard of it",
        "        return self.shown is not None and not self.unaware and",
        "        return self.shown is not None and",
        "no life can believe a roster again by which one before it has gone on",
    ),
    Mutant(
        "rosters are handed out while the roll is called",
        "    if not roll.is_over or witness.is_strange(state, member):\n        return None\n",
        "    if witness.is_strange(state, member):\n        return None\n",
        "a life that does not know who is missing tells nobody who lives",
    ),
    Mutant(
        "a stranger is given a roster",
        "    if not roll.is_over or witness.is_strange(state, member):\n        return None\n",
        "    if not roll.is_over:\n        return None\n",
        "who may serve somebody unknown is not counted by the next life either",
    ),
    Mutant(
        "a stranger is drained at once",
        "    if not model.roll.is_over or witness.is_strange(state, member):\n        return Drained()\n",
        "    if not model.roll.is_over:\n        return Drained()\n",
        "who was not on the roll may serve somebody of whom nobody else has heard",
    ),
    Mutant(
        "a stranger's host copies are released at once",
        "    if not model.roll.is_over or witness.is_strange(state, member):\n        return ()\n",
        "    if not model.roll.is_over:\n        return ()\n",
        "who was not on the roll may serve somebody of whom nobody else has heard",
    ),
    Mutant(
        "while the roll is called anybody is a source",
        "    return [candidate for candidate in found if _has_heard_us(state.known(candidate.worker))]\n",
        "    return found\n",
        "who reads by the word of a life that dies at once reads from somebody who shows no older roster",
    ),
    Mutant(
        "a group is answered before it is whole",
        "    return model.roll.is_over and (not state.is_recovering or len(replica.members) == replica.shards)\n",
        "    return model.roll.is_over\n",
        "a shard of which nobody has heard may have been answered by a life before",
    ),
    Mutant(
        "who has left stays on the roster",
        "    rollcall.end(state, model, member)\n",
        "",
        "nobody is awaited who has left in good order",
    ),
    Mutant(
        "a roster outlives its worker's lease",
        "roster=proofs.roster if worker.now < worker.slot.trust_until else None,",
        "roster=proofs.roster,",
        "who may have been given up since says nothing of who lives",
    ),
    Mutant(
        "nobody says that it was told drained",
        "        return self.is_drained or self.report.stops\n",
        "        return self.is_drained\n",
        "nobody relies on what a life before has let somebody change",
    ),
    Mutant(
        "copies are released in the first lease",
        "not model.roll.is_over or state.is_recovering:  # there is no way back",
        "not model.roll.is_over:",
        "in the first lease nothing is given up for which there is no way back",
    ),
    Mutant(
        "nobody waits for room that is being made",
        "    if is_squeezed and not member.report.closing and _makes_room(state, member):\n",
        "    if False:\n",
        "the established version is not given up for want of room that others are about to leave",
    ),
    Mutant(
        "who looks for a source is not told of a new one",
        "    if wanted is not None and grants.is_looking(state, member, wanted):\n",
        "    if False:\n",
        "a reader without a source gets one as soon as there is one",
    ),
    Mutant(
        "who leaves is not told that others have it",
        "        found.append(references_of(content.buffer.version, shard))\n",
        "        pass\n",
        "a drain ends as soon as nobody needs what is left",
    ),
    Mutant(
        "who waits for a version is not told of its loss",
        "        found += [loss_of(call.version)] if call.version is not None else [SERVICE]\n",
        "        found += [SERVICE]\n",
        "a call for what is lost ends at once",
    ),
    Mutant(
        "who is still is never decided for",
        "        if member.settled_at != state.happened or member.told is None",
        "        if member.told is None",
        "what has happened elsewhere reaches everybody within a report",
    ),
    Mutant(
        "an idle source may be slow",
        "        if not candidate.is_slow and candidate.avoided_until <= state.now\n",
        "        if candidate.avoided_until <= state.now\n",
        "a source that was left for being slow is nobody's first choice",
    ),
    Mutant(
        "nobody waits for copies that the first lease keeps",
        "    if state.is_recovering and member.content.copies:\n        return True\n",
        "",
        "the established version is not given up for want of room that others are about to leave",
    ),
    Mutant(
        "an update is resolved before all shards are here",
        '    missing = _missing(replica) if call.verb == "update" and len(replica.members) < replica.shards else None\n',
        "    missing = None\n",
        "no update goes back, after a cut either",
    ),
    Mutant(
        "who waited for a source that stood still is sent elsewhere when that one gets something",
        "    _note_fed(state, member, former)\n",
        "",
        "a reader stays in its site when its source has something for it at last",
    ),
)
