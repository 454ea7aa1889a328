import { readFileSync } from 'node:fs'
import { join } from 'node:path'

import { describe, expect, test } from 'vitest'

import type { DescribeProtectionResponse, Fleet, Incident, SecondaryStatusTransition, TrainingJob } from '../src/contract'
import { RESUMED_BY_A_PERSON } from '../src/model/act'
import type { HeldNode } from '../src/model/facts'
import { phaseLengths } from '../src/model/figures'
import { hitAlike, openIncident, usualRate, verdict, type Facts, type Progress } from '../src/model/verdict'

const NOW = 1_800_000_000
const job = (changes: Partial<TrainingJob> = {}): Facts['job'] => ({
  TrainingJobName: 'gpt', RunId: 'run', FleetName: 'main', TrainingJobStatus: 'InProgress', SecondaryStatus: 'Training', Reason: 'trains from step 0',
  Generation: 1, NodeCount: 4, GenerationNodeCount: 4, AssignedNodeCount: 4, HealthyNodeCount: 4,
  Boundary: 1204, MaxBoundary: 1204, CommittedStep: 1203, CreationTime: NOW - 3600, TrainingStartTime: NOW - 3500, ...changes,
})
const interrupted = (State: SecondaryStatusTransition['State']) =>
  job({ SecondaryStatus: 'Interrupted', Reason: 'place 1 in the queue', SecondaryStatusTransitions: [{ Status: 'Interrupted', State, StartTime: NOW - 30, StatusMessage: '' }] })
/** Headings of the runbook, as its links name them. */
const SECTIONS = new Set([...readFileSync(join(import.meta.dirname, '../../docs/runbook.md'), 'utf8').matchAll(/^### (.+)$/gm)].map(([, heading]) => heading!.toLowerCase().replaceAll(' ', '-')))
const shard = (inView = 2) => ({ Rank: 0, OwnerNodeId: 'i-a', CommittedStep: 1203, Bytes: 1, Reason: '', Holders: ['i-a', 'i-b'].map((NodeId, index) => ({ NodeId, InView: index < inView })) })
const protection = (changes: Partial<DescribeProtectionResponse> = {}): Partial<DescribeProtectionResponse> => ({
  CommittedStep: 1203, CommittedAt: NOW - 2, Copies: 2, ProtectionState: 'Protected', Reason: '',
  RecoveryOdds: [{ LostNodes: 1, Probability: 1 }, { LostNodes: 2, Probability: 0.93 }], Shards: [shard(), shard()],
  LastCheckpoint: { Step: 1200, Generation: 1, CompletedAt: NOW - 10, Bytes: 1 }, ...changes,
})
const progress = (changes: Partial<Progress> = {}): Progress => ({ boundary: 1204, movedAt: NOW - 1, rate: 2, usualRate: 2, watchedSince: NOW - 100, ...changes })
const incident = (changes: Partial<Incident> = {}): Incident => ({
  IncidentId: 'inc-1', TrainingJobName: 'gpt', Project: 'default', RunId: 'run', Cause: 'instance_terminated', Phase: 'replace', Evidence: ['EC2 says so'], Decision: 'replace i-a', Reason: 'lost',
  GenerationBefore: 1, RankSources: [], InstanceIds: ['i-a'], FaultedInstanceIds: ['i-a'], ReplacementInstanceIds: [], FailedAt: NOW - 12, OpenedAt: NOW - 10, DetectSeconds: 2, ...changes,
})
const closed = (seconds: number, id: string): Incident =>
  incident({ IncidentId: id, Phase: 'closed', FailedAt: NOW - 1000, OpenedAt: NOW - 999, ClosedAt: NOW - 900, DetectSeconds: 1, ReplaceSeconds: seconds, RestoreSeconds: 3, ReworkSeconds: 1 })
const facts = (changes: Partial<Facts> = {}): Facts => ({ job: job(), protection: protection(), incidents: [], fleet: { FleetName: 'main', FleetStatus: 'active', Reason: 'keeps 4 nodes', Drift: [] }, progress: progress(), now: NOW, ...changes })
const all = (changes: Partial<Facts>) => verdict(facts(changes))

describe('is it moving?', () => {
  const cases: [string, Partial<Facts>, string, RegExp][] = [
    ['training', {}, 'Moving', /^Step 1,204, 1 s ago; 2\.0 steps\/s, as usual\.$/],
    ['fewer nodes', { job: { ...facts().job, NodeCount: 4, GenerationNodeCount: 3 } }, 'Moving on 3 of 4 nodes', /as usual\. It grows back when capacity returns\.$/],
    ['slower', { progress: progress({ rate: 1 }) }, 'Moving', /50 % of its usual rate/],
    ['faster', { progress: progress({ rate: 4 }) }, 'Moving', /2\.0 times its usual rate/],
    ['slow steps', { progress: progress({ rate: 0.05, usualRate: 0.05 }) }, 'Moving', /20 s a step, as usual/],
    ['a server whose clock is a little ahead', { protection: protection({ CommittedAt: NOW + 3 }) }, 'Moving', /^Step 1,204, just now;/],
    ['a page just opened', { progress: progress({ movedAt: undefined, rate: undefined, watchedSince: NOW }), protection: protection({ CommittedAt: undefined }) }, 'Moving', /^Step 1,204; 2\.0 steps\/s on average\.$/],
    ['a fresh page and an old commit', { progress: progress({ movedAt: undefined, rate: undefined, watchedSince: NOW }), protection: protection({ CommittedAt: NOW - 200 }) }, 'Standing still', /the last step was 3 min ago/],
    ['no step for long', { progress: progress({ movedAt: NOW - 61 }), protection: protection({ CommittedAt: NOW - 90 }) }, 'Standing still', /the last step was 1 min ago/],
    ['it waits on purpose', { job: job({ Reason: 'trains; rank 0 on i-a waits on purpose (phase wait), for at most 600 s' }), progress: progress({ movedAt: NOW - 61 }), protection: protection({ CommittedAt: NOW - 90 }) }, 'Standing still', /1 min ago\. Trains; rank 0 on i-a waits on purpose \(phase wait\), for at most 600 s\.$/],
    ['no step for long, but steps take long', { progress: progress({ movedAt: NOW - 61, usualRate: 0.05, rate: undefined }) }, 'Moving', /Step 1,204/],
    ['never a step since opened', { progress: progress({ movedAt: undefined, watchedSince: NOW - 120 }), protection: undefined }, 'Standing still', /no step since this page was opened 2 min ago/],
    ['nothing watched yet', { progress: undefined, protection: undefined }, 'Moving', /^Step 1,204\.$/],
    ['catching up', { job: job({ Boundary: 1190 }), incidents: [incident({ Phase: 'rework' })] }, 'Moving, catching up', /Redoing steps up to 1,204/],
    ['recovering', { job: job({ SecondaryStatus: 'Restarting' }), incidents: [incident()] }, 'Not moving, recovering', /had reached step 1,204/],
    ['recovering before any step', { job: job({ SecondaryStatus: 'Restarting', Boundary: -1, MaxBoundary: -1 }), incidents: [incident()] }, 'Not moving, recovering', /had not made a step yet/],
    ['ranks run, no step yet', { job: job({ Boundary: 0, MaxBoundary: 0, BaseStep: 0, SecondaryStatusTransitions: [{ Status: 'Training', State: 'running', StartTime: NOW - 30, StatusMessage: '' }] }) }, 'Starting', /^The ranks run for 30 s, but have made no step since they were started\.$/],
    ['ranks start', { job: job({ SecondaryStatus: 'Starting', Boundary: 0, MaxBoundary: 0, BaseStep: 0, SecondaryStatusTransitions: [{ Status: 'Starting', State: 'running', StartTime: NOW - 30, StatusMessage: '' }] }) }, 'Starting', /^The ranks run for 30 s, but have made no step since they were started\.$/],
    ['… for very long', { job: job({ Boundary: 0, BaseStep: 0, SecondaryStatusTransitions: [{ Status: 'Training', State: 'running', StartTime: NOW - 700, StatusMessage: '' }] }) }, 'Standing still', /for 11 min 40 s/],
    ['ranks run again, at their base', { job: job({ Boundary: 1200, BaseStep: 1200 }), incidents: [incident({ Phase: 'restore' })] }, 'Not moving, recovering', /no step since they were started\. It had reached step 1,204\.$/],
    ['paused', { job: job({ SecondaryStatus: 'Paused', Reason: 'paused after step 1204' }) }, 'Paused', /^It had reached step 1,204\. Paused after step 1204\.$/],
    ['pausing', { job: job({ SecondaryStatus: 'Pausing', Reason: 'pauses as a user asked' }) }, 'Pausing', /^Step 1,204\. Pauses as a user asked\.$/],
    ['pausing while it recovers', { job: job({ SecondaryStatus: 'Pausing' }), incidents: [incident()] }, 'Not moving, recovering', /1,204/],
    ['interrupted: it queues', { job: interrupted('queued') }, 'Interrupted, without nodes', /^It had reached step 1,204\. Place 1 in the queue\.$/],
    ['interrupted: it collects nodes', { job: interrupted('allocating') }, 'Interrupted, without nodes', /1,204/],
    ['interrupted: it gives way', { job: interrupted('pausing') }, 'Giving its nodes back', /1,204/],
    ['queued', { job: job({ SecondaryStatus: 'Pending', Reason: 'waits for 4 nodes' }) }, 'Queued', /^Waits for 4 nodes\.$/],
    ['first launch', { job: job({ SecondaryStatus: 'Starting', Boundary: -1, Reason: 'ranks are started' }) }, 'Starting', /^No step yet\. Ranks are started\.$/],
    ['stopping', { job: job({ TrainingJobStatus: 'Stopping', SecondaryStatus: 'Stopping', Reason: 'a user asked' }) }, 'Stopping', /^Step 1,204\. A user asked\.$/],
    ['done', { job: job({ TrainingJobStatus: 'Completed', SecondaryStatus: 'Completed', Reason: 'every rank ended' }) }, 'Finished', /^1,204 steps done\. Every rank ended\.$/],
    ['failed', { job: job({ TrainingJobStatus: 'Failed', FailureReason: 'rank 2 exits with 1', Reason: 'other' }) }, 'Failed', /It got to step 1,204\. Rank 2 exits with 1\./],
    ['failed with a traceback', { job: job({ TrainingJobStatus: 'Failed', MaxBoundary: 0, Boundary: 0, FailureReason: 'error (1)\nTraceback\n  File\nRuntimeError: no' }) }, 'Failed', /^Error \(1\)\. RuntimeError: no\.$/],
    ['stopped', { job: job({ TrainingJobStatus: 'Stopped', Reason: 'a user asked', Boundary: -1, MaxBoundary: -1 }) }, 'Stopped', /^A user asked\.$/],
    ['a server that says nothing', { job: { TrainingJobName: 'gpt' } }, 'Unknown', /has not said/],
  ]
  test.each(cases)('%s', (_, changes, title, text) => {
    const { moving } = all(changes)
    expect(moving.title).toBe(title)
    expect(moving.text).toMatch(text)
  })
})

describe('is it safe?', () => {
  const cases: [string, Partial<Facts>, string, string, RegExp][] = [
    ['protected', {}, 'good', 'Protected', /^Step 1,203 on 2 nodes each; any single loss: survived from memory; any two: survived from memory in 93 % of the cases\. Step 1,200 is in S3\.$/],
    ['degraded', { protection: protection({ ProtectionState: 'Degraded', Reason: 'rank 3 has 1', Shards: [shard(), shard(1)] }) }, 'warn', 'Degraded', /on 1 node each.*Rank 3 has 1\.$/],
    ['a single loss is not survived', { protection: protection({ RecoveryOdds: [{ LostNodes: 1, Probability: 0 }], Shards: [shard(1)] }) }, 'warn', 'Protected', /any single loss: back to S3/],
    ['… and nothing is in S3', { protection: protection({ RecoveryOdds: [{ LostNodes: 1, Probability: 0 }], LastCheckpoint: undefined }) }, 'warn', 'Protected', /back to the start.*Nothing is in S3\.$/],
    ['parity', { protection: protection({ Copies: 1, ParityGroupSize: 4 }) }, 'good', 'Protected', /committed, with parity over groups of 4 nodes; any single loss: survived from memory/],
    ['nearly certain is not certain', { protection: protection({ RecoveryOdds: [{ LostNodes: 2, Probability: 0.99996 }] }) }, 'good', 'Protected', /99\.996 %/],
    ['nothing committed', { job: job({ CommittedStep: -1 }), protection: protection({ CommittedStep: -1, RecoveryOdds: [], LastCheckpoint: undefined, ProtectionState: 'Unprotected' }) }, 'bad', 'Unprotected', /nothing is in S3/],
    ['nothing committed at the first step', { job: job({ Boundary: 1, MaxBoundary: 1, CommittedStep: -1 }), protection: protection({ CommittedStep: -1, RecoveryOdds: [], ProtectionState: 'Unprotected' }) }, 'idle', 'Not yet protected', /no step has been committed/i],
    ['nothing committed, but a checkpoint', { job: job({ CommittedStep: -1 }), protection: protection({ CommittedStep: -1, RecoveryOdds: [], ProtectionState: 'Unprotected' }) }, 'bad', 'Unprotected', /step 1,200 is in S3/],
    ['odds that cannot be counted', { protection: protection({ RecoveryOdds: [] }) }, 'good', 'Protected', /cannot be counted/],
    ['paused', { job: job({ SecondaryStatus: 'Paused' }), protection: protection({ ProtectionState: 'Unprotected', Shards: [], RecoveryOdds: [] }) }, 'idle', 'Kept in S3', /nothing is in memory; step 1,200 is in S3\.$/],
    ['interrupted, and nothing in S3', { job: interrupted('queued'), protection: protection({ LastCheckpoint: undefined }) }, 'warn', 'Nothing is kept', /nothing is in S3/],
    ['not heard', { protection: undefined }, 'idle', 'Protection unknown', /Not heard/],
    ['over', { job: job({ TrainingJobStatus: 'Completed' }) }, 'idle', 'Memory released', /job is over; step 1,200 is in S3/],
    ['failed beyond its checkpoint', { job: job({ TrainingJobStatus: 'Failed' }) }, 'warn', 'Only step 1,200, in S3', /^It had reached step 1,204, and the checkpoint of step 1,200 is what is left\. Its nodes’ memory is released\.$/],
    ['failed without one', { job: job({ TrainingJobStatus: 'Failed' }), protection: protection({ LastCheckpoint: undefined }) }, 'bad', 'No: nothing is kept', /no checkpoint of it is left/],
    ['failed, and all is kept', { job: job({ TrainingJobStatus: 'Failed', Boundary: 1200, MaxBoundary: 1200 }) }, 'idle', 'Kept in S3', /kept in S3/],
    ['an answer without its parts', { protection: {} }, 'idle', 'Unknown', /nothing is in S3/i],
    ['a silent holder', { job: job({ HealthyNodeCount: 3 }) }, 'warn', 'Unconfirmed', /^Step 1,203 was committed, but only 3 of 4 nodes are connected and healthy\./],
    ['a stale page', { staleSeconds: 60 }, 'idle', 'Unknown', /^Last known 1 min 00 s ago: Protected\./],
  ]
  test.each(cases)('%s', (_, changes, tone, title, text) => {
    const said = all(changes).protection
    expect(said.title).toBe(title)
    expect(said.tone).toBe(tone)
    expect(said.text).toMatch(text)
  })
})

describe('what is being done', () => {
  test('nothing without an incident, or when it is closed', () => {
    expect(all({}).recovery).toBeUndefined()
    expect(all({ incidents: [closed(5, 'a')] }).recovery).toBeUndefined()
  })
  test('the phase, how long it has taken, and how long it usually takes', () => {
    const { recovery } = all({ incidents: [closed(5, 'a'), closed(9, 'b'), closed(7, 'c'), incident()] })
    expect(recovery).toMatchObject({ phase: 'replace', elapsedSeconds: 10, usualSeconds: 7, tone: 'busy', incidentId: 'inc-1' })
    expect(recovery!.text).toMatch(/An instance was terminated\. Replace i-a\. This phase has taken 10 s \(usually 7\.0 s after this kind of failure\)\./)
  })
  test('without earlier ones nothing is compared', () => {
    expect(all({ incidents: [incident()] }).recovery).toMatchObject({ usualSeconds: undefined, tone: 'busy' })
  })
  test('far longer than usual is worth a look', () => {
    const late = incident({ FailedAt: NOW - 62, OpenedAt: NOW - 60 })
    expect(all({ incidents: [closed(5, 'a'), late] }).recovery?.tone).toBe('warn')
    expect(all({ incidents: [late] }).recovery?.tone).toBe('busy')
    expect(all({ incidents: [incident({ FailedAt: NOW - 400, OpenedAt: NOW - 398 })] }).recovery?.tone).toBe('warn')
  })
  test('lost steps are told once they are known', () => {
    expect(all({ incidents: [incident({ LostSteps: 1 })] }).recovery!.text).toMatch(/1 step to be done again/)
    expect(all({ incidents: [incident({ LostSteps: 0 })] }).recovery!.text).toMatch(/No step was lost/)
  })
  test('a cause that a newer server adds is said in its own words', () => {
    expect(all({ incidents: [incident({ Cause: 'disk_full' as Incident['Cause'] })] }).recovery!.text).toMatch(/^Disk full\./)
  })
})

describe('what it waits for', () => {
  test('the words of the job and of a fleet that cannot help', () => {
    const waiting = job({ SecondaryStatus: 'Starting', Reason: 'waits for 4 nodes' })
    expect(all({ job: waiting }).waiting?.text).toBe('Waits for 4 nodes.')
    expect(all({ job: waiting, fleet: { FleetStatus: 'frozen', Reason: 'InsufficientInstanceCapacity' } }).waiting?.text).toBe('Waits for 4 nodes. InsufficientInstanceCapacity.')
  })
  const short = 'We currently do not have sufficient p5.48xlarge capacity in the Availability Zone you requested (us-east-2a). Launching EC2 instance failed'
  const midnight = Date.UTC(2026, 2, 1) / 1000
  const asks = (at: string, now: number, said = short) => all({ job: job({ SecondaryStatus: 'Starting', Reason: `waits for 1 node: ${said}; Everstep retries at ${at} UTC` }), fleet: { FleetStatus: 'active', InstanceType: 'p5.48xlarge', AvailabilityZone: 'us-east-2a' }, now }).waiting!
  test('what AWS does not give: what it means, when it is asked again, and AWS in its own words', () => {
    expect(asks('09:20:19', midnight + 9 * 3600 + 20 * 60 + 7)).toMatchObject({ title: 'Waits for 1 node', text: `AWS has no p5.48xlarge to give in us-east-2a. Everstep asks again in 12 s (09:20:19 UTC). AWS says: “${short}.”` })
    expect(asks('00:05:00', midnight - 600).text).toMatch(/again in 15 min 00 s \(00:05:00 UTC\)/)
    expect(asks('23:59:00', midnight + 10).text).toMatch(/again now \(23:59:00 UTC\)/)
    expect(asks('09:00:00', midnight, 'You have no permission').text).toMatch(/^AWS has started no instance\..* AWS says: “You have no permission\.”$/)
    expect(readFileSync(join(import.meta.dirname, '../../control_plane/core/capacity.py'), 'utf8')).toContain('"; Everstep retries at {')
  })
  test('of a paused job, a person', () => expect(all({ job: job({ SecondaryStatus: 'Paused' }) }).waiting?.title).toBe('A person'))
  test('nothing while it trains or when it is over', () => {
    expect(all({}).waiting).toBeUndefined()
    expect(all({ job: job({ TrainingJobStatus: 'Failed' }) }).waiting).toBeUndefined()
  })
})

describe('do I need to act?', () => {
  const suspended: Partial<Fleet> = { FleetName: 'main', AutoScalingGroupName: 'asg-1', FleetStatus: 'active', Reason: `waits for 1 instances: its group's Launch process is suspended (User suspended): ${RESUMED_BY_A_PERSON}` }
  const frozen: Partial<Fleet> = { FleetName: 'main', FleetStatus: 'frozen', Reason: 'the group is not as needed', Drift: ['ReplaceUnhealthy is not suspended'] }
  const cases: [string, Partial<Facts>, boolean, RegExp][] = [
    ['all is well', {}, false, /a failure would be recovered from/],
    ['recovering', { job: job({ SecondaryStatus: 'Restarting' }), incidents: [incident()] }, false, /needs nobody/],
    ['recovering for too long', { job: job({ SecondaryStatus: 'Restarting' }), incidents: [incident({ FailedAt: NOW - 400, OpenedAt: NOW - 398 })] }, true, /longer than 5 min/],
    ['recovering in a frozen fleet', { incidents: [incident()], fleet: frozen }, true, /fleet is frozen/],
    ['training in a frozen fleet', { fleet: frozen }, true, /would not be replaced/],
    ['failed', { job: job({ TrainingJobStatus: 'Failed' }) }, true, /will not start again/],
    ['completed', { job: job({ TrainingJobStatus: 'Completed' }) }, false, /done/],
    ['recovering while a person has suspended launches', { incidents: [incident()], fleet: suspended }, true, /its group starts none/],
    ['waiting for nodes while a person has suspended launches', { job: job({ SecondaryStatus: 'Pending' }), fleet: suspended }, true, /waits for nodes, and their group starts none/],
    ['standing still while a person has suspended launches', { progress: progress({ movedAt: NOW - 300 }), protection: protection({ CommittedAt: NOW - 300 }), fleet: suspended }, true, /make no steps/],
    ['training while a person has suspended launches', { fleet: suspended }, true, /would not be replaced/],
    ['training while AWS has suspended launches', { fleet: { ...suspended, Reason: "its group's Launch process is suspended (…): AWS suspended it after failures and it is lifted" } }, false, /trains/],
    ['completed in a frozen fleet', { job: job({ TrainingJobStatus: 'Completed' }), fleet: frozen }, false, /done/],
    ['stopped', { job: job({ TrainingJobStatus: 'Stopped' }) }, false, /was stopped/],
    ['stopping', { job: job({ TrainingJobStatus: 'Stopping' }) }, false, /stops by itself/],
    ['standing still', { progress: progress({ movedAt: NOW - 300 }), protection: protection({ CommittedAt: NOW - 300 }) }, true, /make no steps/],
    ['at a third of its rate', { progress: progress({ rate: 0.6 }) }, true, /less than half/],
    ['at 60 % of its rate', { progress: progress({ rate: 1.2 }) }, false, /recovered from/],
    ['queued', { job: job({ SecondaryStatus: 'Pending' }) }, false, /its turn\.$/],
    ['queued with a limit', { job: job({ SecondaryStatus: 'Pending', StoppingCondition: { MaxPendingTimeInSeconds: 7200 } }) }, false, /gives up in 1 h 00 min/],
    ['before the first step', { job: job({ Boundary: 0, BaseStep: 0 }) }, false, /first step of a launch/],
    ['before the first commit', { job: job({ CommittedStep: -1, Boundary: 1, MaxBoundary: 1 }), protection: protection({ CommittedStep: -1, ProtectionState: 'Unprotected', LastCheckpoint: undefined }) }, false, /No step is kept in memory yet/],
    ['degraded', { protection: protection({ ProtectionState: 'Degraded' }) }, false, /Fewer copies/],
    ['unprotected while it trains', { protection: protection({ ProtectionState: 'Unprotected' }) }, true, /no step is kept in memory/],
    ['starting', { job: job({ SecondaryStatus: 'Starting' }) }, false, /on its way/],
    ['no news', { staleSeconds: 40 }, true, /heard nothing for 40 s/],
    ['news of a failing server', { staleSeconds: 40, refusal: 'the database is locked' }, true, /refused to say .* for 40 s.*The database is locked\.$/],
    ['no news of a job that was done when there was some', { job: job({ TrainingJobStatus: 'Completed' }), staleSeconds: 40 }, true, /heard nothing/],
    ['paused', { job: job({ SecondaryStatus: 'Paused' }) }, true, /does not go on by itself/],
    ['pausing', { job: job({ SecondaryStatus: 'Pausing' }) }, false, /waits to be resumed/],
    ['interrupted, and it queues', { job: interrupted('queued') }, false, /goes on by itself, from S3/],
    ['interrupted, and it still has its nodes', { job: interrupted('pausing') }, false, /gives its nodes to another job/],
    ['a short silence', { staleSeconds: 14 }, false, /recovered from/],
  ]
  test.each(cases)('%s', (_, changes, needed, text) => {
    const { act } = all(changes)
    expect(act.needed).toBe(needed)
    expect(act.title).toBe(needed ? 'Yes' : 'No')
    expect(act.text).toMatch(text)
    expect(act.steps.length > 0).toBe(needed)
    expect(act.section === undefined || SECTIONS.has(act.section)).toBe(true)
    expect(act.section !== undefined || !needed).toBe(true)
  })
  test('nodes that its failures have left wait for a person, and the job does not', () => {
    const held: HeldNode[] = [{ NodeId: 'i-a', NodeStatus: 'held', Hold: 'inspection' }, { NodeId: 'i-b', NodeStatus: 'held', Hold: 'unreachable' }, { NodeId: 'i-c', NodeStatus: 'spare' }]
    const { act } = all({ heldNodes: held })
    expect(act).toMatchObject({ needed: false, title: 'Not now', section: 'held-node', steps: ['i-a: end the instance if its hardware is at fault; release it if it is well.'], nodes: { ids: ['i-a'] } })
    const because = (Reason: string) => all({ heldNodes: [{ ...held[0]!, Reason }] }).act.steps
    expect(because('the agent of i-a reports gpu_xid: gpu 5 (H100): Xid 79')).toEqual([expect.stringMatching(/^i-a: Xid 79 says that its GPU has fallen off the bus.*: end the instance\.$/)])
    expect(because('gpu 5: Xid 94')).toEqual([expect.stringMatching(/at fault, as Xid 94 suggests; release it/)])
    expect(act.text).toMatch(/recovered from\. What can wait: 1 node that it lost waits for a person\.$/)
    expect(all({ heldNodes: held.slice(1) }).act.steps).toEqual([])
    const failed = all({ job: job({ TrainingJobStatus: 'Failed' }), heldNodes: held }).act
    expect(failed).toMatchObject({ needed: true, section: 'failed' })
    expect(failed.steps.at(-1)).toMatch(/^i-a: end the instance/)
  })
  test('what differs in AWS is what to do', () => {
    expect(all({ fleet: suspended }).act.steps[0]).toContain('aws autoscaling resume-processes --auto-scaling-group-name asg-1 ')
    expect(readFileSync(join(import.meta.dirname, '../../control_plane/core/capacity.py'), 'utf8')).toContain(RESUMED_BY_A_PERSON)
    expect(all({ fleet: frozen }).act.steps).toEqual(['Put right in AWS: ReplaceUnhealthy is not suspended'])
  })
})

describe('a job that a person has taken over', () => {
  const taken = (changes: Partial<TrainingJob> = {}) => job({ TakenOverTime: NOW - 60, TakenOverBy: 'ada', Reason: 'taken over by ada: Everstep observes and decides nothing', ...changes })
  test('with an open incident: nobody recovers it', () => {
    const told = all({ job: taken({ SecondaryStatus: 'Restarting' }), incidents: [incident()] })
    expect(told.act).toMatchObject({ needed: true, tone: 'bad', section: 'taken-over' })
    expect(told.act.text).toMatch(/^Nobody acts for this job: ada has taken it over, and its ranks do not train\.$/)
    expect(told.act.steps.at(-1)).toMatch(/everstep jobs hand-back gpt$/)
    expect(told.moving).toMatchObject({ tone: 'bad', title: 'Not moving', text: 'It had reached step 1,204. Nobody recovers it: it was taken over.' })
  })
  test('with a failure of which no incident is opened, because nobody decides', () => {
    const { act } = all({ job: taken({ Reason: 'taken over by ada: Everstep observes and decides nothing; what it sees: i-a is gone' }) })
    expect(act).toMatchObject({ needed: true, tone: 'bad' })
    expect(act.text).toMatch(/and i-a is gone\.$/)
  })
  test.each([[{ TrainingJobStatus: 'Stopping', SecondaryStatus: 'Stopping' }, /asked to stop/], [{ SecondaryStatus: 'Pausing' }, /asked to pause/]] as const)('what was asked for waits: %o', (changes, text) => {
    expect(all({ job: taken(changes) }).act).toMatchObject({ needed: true, text: expect.stringMatching(text) })
  })
  test('that trains: nothing now, and a failure waits', () => {
    expect(all({ job: taken() }).act).toMatchObject({ needed: false, tone: 'warn', text: expect.stringMatching(/^Ada looks after this job\. A failure now waits for a person/) })
  })
  test('that catches up by itself', () => expect(all({ job: taken(), incidents: [incident({ Phase: 'rework' })] }).moving.title).toBe('Moving, catching up'))
  test('that has ended', () => expect(all({ job: taken({ TrainingJobStatus: 'Completed' }) }).act.text).toBe('The job is done.'))
})

describe('other jobs that the same fault has hit', () => {
  const other = (changes: Partial<Incident> = {}) => incident({ RunId: 'other', TrainingJobName: 'other', FailedAt: NOW - 20, ...changes })
  const hit = (open: Incident | undefined, ...others: Incident[]) => hitAlike(job(), open, [incident(), ...others], new Set(['other', 'third']))
  test('failed in the same way at the same time, over by now or not', () => {
    expect(hit(incident(), other(), other({ RunId: 'third', TrainingJobName: 'third', ClosedAt: NOW }), other({ IncidentId: 'again' }))).toEqual(['other', 'third'])
  })
  test.each([
    ['this job has no open incident', undefined, other()],
    ['another cause', incident(), other({ Cause: 'rank_exit' })],
    ['long before', incident(), other({ FailedAt: NOW - 12 - 301 })],
    ['another fleet', incident(), other({ RunId: 'elsewhere' })],
    ['two drills', incident({ Cause: 'drill' }), other({ Cause: 'drill' })],
  ])('not: %s', (_, open, them) => expect(hit(open, them)).toEqual([]))
})

describe('banners', () => {
  test('none when nothing is wider than the job', () => expect(all({}).banners).toEqual([]))
  test('who has taken the job over', () => {
    expect(all({ job: job({ TakenOverTime: NOW, TakenOverBy: 'ada, est_1' }) }).banners[0]!.text).toMatch(/^ada, est_1 has taken it over/)
  })
  test.each([
    [{ fleet: { FleetName: 'main', FleetStatus: 'frozen', Reason: 'blind', Drift: [] } }, /Fleet main is frozen/],
    [{ fleet: { FleetName: 'main', FleetStatus: 'active', Reason: RESUMED_BY_A_PERSON } }, /Fleet main starts no instances/],
    [{ fleet: { FleetStatus: 'deleting' } }, /being deleted/],
    [{ othersHit: ['a'] }, /Wider than this job/],
    [{ staleSeconds: 60 }, /No news/],
  ] as [Partial<Facts>, RegExp][])('%o', (changes, title) => expect(all(changes).banners.map((banner) => banner.title).join()).toMatch(title))
  test('others are counted and named', () => {
    expect(all({ othersHit: ['a', 'b'] }).banners[0]!.text).toBe('2 other jobs of this fleet failed in the same way at the same time: a, b.')
    expect(all({ othersHit: ['a'] }).banners[0]!.text).toMatch(/^1 other job of this fleet failed/)
  })
  test('a server that refuses is told from one that is away', () => {
    expect(all({ staleSeconds: 60, refusal: 'the database is locked' }).banners[0]!.text).toBe('The control plane has refused for 1 min 00 s: The database is locked. What you see is old.')
  })
})

describe('phases', () => {
  test('of a closed incident add up to the interruption', () => {
    const done = incident({ Phase: 'closed', FailedAt: NOW - 20, OpenedAt: NOW - 18, ClosedAt: NOW - 4, DetectSeconds: 2, ReplaceSeconds: 5, RestoreSeconds: 6, ReworkSeconds: 3 })
    const lengths = phaseLengths(done, NOW)
    expect(lengths.map((each) => each.phase)).toEqual(['detect', 'replace', 'restore', 'rework'])
    expect(lengths.reduce((sum, each) => sum + each.seconds, 0)).toBe(16)
  })
  test.each([['replace', 2], ['restore', 3], ['rework', 4]] as const)('of an open one: %s is the last, and all add up to now', (phase, number) => {
    const lengths = phaseLengths(incident({ Phase: phase, ReplaceSeconds: 3, RestoreSeconds: 2 }), NOW)
    expect(lengths).toHaveLength(number)
    expect(lengths.at(-1)!.isOpen).toBe(true)
    expect(lengths.reduce((sum, each) => sum + each.seconds, 0)).toBe(12)
  })
})

test('the newest open incident counts', () => {
  expect(openIncident([closed(1, 'a'), incident({ IncidentId: 'b' }), incident({ IncidentId: 'c' })])?.IncidentId).toBe('c')
  expect(openIncident(undefined)).toBeUndefined()
})

test('a usual rate needs steps and time', () => {
  expect(usualRate({ MaxBoundary: 100, AccountingSeconds: { train: 50 } })).toBe(2)
  expect(usualRate({ MaxBoundary: 100, AccountingSeconds: { train: 29 } })).toBeUndefined()
  expect(usualRate({ MaxBoundary: 9, AccountingSeconds: { train: 50 } })).toBeUndefined()
  expect(usualRate({})).toBeUndefined()
})
