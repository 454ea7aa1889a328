import { readFileSync } from 'node:fs'
import { join } from 'node:path'

import { describe, expect, test } from 'vitest'

import type {
  CapacityWait,
  DescribeProtectionResponse,
  Fleet,
  Incident,
  IncidentAction,
  SecondaryStatusTransition,
  TrainingJob,
} from '../src/contract'
import { RESUMED_BY_A_PERSON } from '../src/model/act'
import type { HeldNode } from '../src/model/facts'
import { phaseLengths, phaseTexts, type Phase } from '../src/model/figures'
import { duration } from '../src/model/format'
import { hitAlike, openIncident, usualRate, verdict, type Facts, type Progress } from '../src/model/verdict'
import { OBSERVED } from '../src/model/standing'

const NOW = 1_800_000_000
const job = (changes: Partial<TrainingJob> = {}): Facts['job'] => ({
  TrainingJobName: 'gpt',
  RunId: 'run',
  FleetName: 'main',
  TrainingJobStatus: 'InProgress',
  SecondaryStatus: 'Training',
  Reason: 'trains from step 0',
  Generation: 1,
  NodeCount: 4,
  GenerationNodeCount: 4,
  AssignedNodeCount: 4,
  HealthyNodeCount: 4,
  Boundary: 1204,
  MaxBoundary: 1204,
  CommittedStep: 1203,
  CreationTime: NOW - 3600,
  TrainingStartTime: NOW - 3500,
  ...changes,
})
const interrupted = (State: SecondaryStatusTransition['State']) =>
  job({
    SecondaryStatus: 'Interrupted',
    Reason: 'place 1 in the queue',
    SecondaryStatusTransitions: [{ Status: 'Interrupted', State, StartTime: NOW - 30, StatusMessage: '' }],
  })
/** Headings of the runbook, as its links name them. */
const SECTIONS = new Set(
  [...readFileSync(join(import.meta.dirname, '../../docs/runbook.md'), 'utf8').matchAll(/^### (.+)$/gm)].map(
    ([, heading]) => heading!.toLowerCase().replaceAll(' ', '-'),
  ),
)
const shard = (inView = 2) => ({
  Rank: 0,
  OwnerNodeId: 'i-a',
  CommittedStep: 1203,
  Bytes: 1,
  Reason: '',
  Holders: ['i-a', 'i-b'].map((NodeId, index) => ({ NodeId, InView: index < inView })),
})
const protection = (changes: Partial<DescribeProtectionResponse> = {}): Partial<DescribeProtectionResponse> => ({
  CommittedStep: 1203,
  CommittedAt: NOW - 2,
  Copies: 2,
  ProtectionState: 'Protected',
  Reason: '',
  RecoveryOdds: [
    { LostNodes: 1, Probability: 1 },
    { LostNodes: 2, Probability: 0.93 },
  ],
  Shards: [shard(), shard()],
  LastCheckpoint: { Step: 1200, Generation: 1, CompletedAt: NOW - 10, Bytes: 1 },
  ...changes,
})
const progress = (changes: Partial<Progress> = {}): Progress => ({
  boundary: 1204,
  movedAt: NOW - 1,
  rate: 2,
  usualRate: 2,
  watchedSince: NOW - 100,
  ...changes,
})
const incident = (changes: Partial<Incident> = {}): Incident => ({
  IncidentId: 'inc-1',
  Headline: 'An instance was terminated',
  TrainingJobName: 'gpt',
  Project: 'default',
  RunId: 'run',
  Cause: 'instance_terminated',
  Phase: 'replace',
  Evidence: ['EC2 says so'],
  Decision: 'replace i-a',
  Reason: 'lost',
  GenerationBefore: 1,
  RankSources: [],
  InstanceIds: ['i-a'],
  FaultedInstanceIds: ['i-a'],
  ReplacementInstanceIds: [],
  FailedAt: NOW - 12,
  OpenedAt: NOW - 10,
  DetectSeconds: 2,
  ...changes,
})
const closed = (seconds: number, id: string): Incident =>
  incident({
    IncidentId: id,
    Phase: 'closed',
    FailedAt: NOW - 1000,
    OpenedAt: NOW - 999,
    ClosedAt: NOW - 900,
    DetectSeconds: 1,
    ReplaceSeconds: seconds,
    RestoreSeconds: 3,
    ReworkSeconds: 1,
  })
const HELD: HeldNode = {
  NodeId: 'i-a',
  HoldAdvice: {
    Decision: 'Inspect',
    Description: 'Inspect node i-a.',
    Command: 'look',
    FurtherCommands: ['terminate', 'release'],
  },
}
const facts = (changes: Partial<Facts> = {}): Facts => ({
  job: job(),
  protection: protection(),
  incidents: [],
  fleet: { FleetName: 'main', FleetStatus: 'active', Reason: 'keeps 4 nodes', Drift: [] },
  progress: progress(),
  now: NOW,
  ...changes,
})
const all = (changes: Partial<Facts>) => verdict(facts(changes))

describe('the state of a job', () => {
  const running = (State: SecondaryStatusTransition['State'], seconds: number) => [
    { Status: 'Training' as const, State, StartTime: NOW - seconds, StatusMessage: '' },
  ]
  const cases: [string, Partial<Facts>, string, string, RegExp | ''][] = [
    ['training', {}, 'good', 'Training', /^Training at step 1,204\.$/],
    [
      'on fewer nodes',
      { job: job({ GenerationNodeCount: 3 }) },
      'warn',
      'Training',
      /^Training at step 1,204 on 3 of 4 nodes\. The job grows again when capacity returns\.$/,
    ],
    [
      'slower',
      { progress: progress({ rate: 1 }) },
      'good',
      'Training',
      /^Training at step 1,204, at 50 % of the usual rate\.$/,
    ],
    [
      'faster',
      { progress: progress({ rate: 4 }) },
      'good',
      'Training',
      /^Training at step 1,204, at 2\.0 times the usual rate\.$/,
    ],
    [
      'a clock of the server that is ahead',
      { protection: protection({ CommittedAt: NOW + 3 }) },
      'good',
      'Training',
      /^Training at step 1,204\.$/,
    ],
    [
      'a page that was just opened',
      {
        progress: progress({ movedAt: undefined, rate: undefined, watchedSince: NOW }),
        protection: protection({ CommittedAt: undefined }),
      },
      'good',
      'Training',
      /^Training at step 1,204\.$/,
    ],
    [
      'a new page and an old commit',
      {
        progress: progress({ movedAt: undefined, rate: undefined, watchedSince: NOW }),
        protection: protection({ CommittedAt: NOW - 200 }),
      },
      'warn',
      'Stalled',
      /^Stalled at step 1,204: the last step was 3 min ago\./,
    ],
    [
      'no step for a minute',
      { progress: progress({ movedAt: NOW - 61 }), protection: protection({ CommittedAt: NOW - 90 }) },
      'warn',
      'Stalled',
      /^Stalled at step 1,204: the last step was 1 min ago\. Trains from step 0\.$/,
    ],
    [
      'a rank that waits by itself',
      {
        job: job({ Reason: 'trains; rank 0 on i-a waits deliberately (phase wait), for at most 600 s' }),
        progress: progress({ movedAt: NOW - 61 }),
        protection: protection({ CommittedAt: NOW - 90 }),
      },
      'warn',
      'Stalled',
      /1 min ago\. Trains; rank 0 on i-a waits deliberately \(phase wait\), for at most 600 s\.$/,
    ],
    [
      'no step for a minute, with long steps',
      { progress: progress({ movedAt: NOW - 61, usualRate: 0.05, rate: undefined }) },
      'good',
      'Training',
      /step 1,204/,
    ],
    [
      'no step since the page was opened',
      { progress: progress({ movedAt: undefined, watchedSince: NOW - 120 }), protection: undefined },
      'warn',
      'Stalled',
      /no step since this page was opened 2 min ago\./,
    ],
    [
      'nothing observed yet',
      { progress: undefined, protection: undefined },
      'good',
      'Training',
      /^Training at step 1,204\.$/,
    ],
    [
      'recomputing',
      { job: job({ Boundary: 1190 }), incidents: [incident({ Phase: 'rework' })] },
      'busy',
      'Recomputing steps',
      /^Recomputing steps: at step 1,190 of 1,204\.$/,
    ],
    [
      'recovering',
      { job: job({ SecondaryStatus: 'Restarting', Reason: 'waits for i-b to prepare' }), incidents: [incident()] },
      'busy',
      'Recovering',
      /^Recovering: replacing nodes for 10 s\. Waits for i-b to prepare\.$/,
    ],
    [
      'recovering, with an earlier incident of the same cause',
      { job: job({ SecondaryStatus: 'Restarting', Reason: '' }), incidents: [closed(7, 'a'), incident()] },
      'busy',
      'Recovering',
      /^Recovering: replacing nodes for 10 s, usually 7\.0 s\.$/,
    ],
    [
      'recovering for too long',
      {
        job: job({ SecondaryStatus: 'Restarting', Reason: '' }),
        incidents: [incident({ FailedAt: NOW - 400, OpenedAt: NOW - 398 })],
      },
      'warn',
      'Recovering',
      /^Recovering: replacing nodes for 6 min 38 s\.$/,
    ],
    [
      'restarting before the incident is known',
      { job: job({ SecondaryStatus: 'Restarting', Reason: 'i-a is lost' }) },
      'busy',
      'Recovering',
      /^Recovering\. I-a is lost\.$/,
    ],
    [
      'before the first step',
      { job: job({ Boundary: 0, MaxBoundary: 0, BaseStep: 0, SecondaryStatusTransitions: running('running', 30) }) },
      'busy',
      'Starting',
      /^Starting: the ranks have run for 30 s, before the first step\.$/,
    ],
    [
      'ranks that start',
      {
        job: job({
          SecondaryStatus: 'Starting',
          Boundary: 0,
          MaxBoundary: 0,
          BaseStep: 0,
          SecondaryStatusTransitions: running('running', 30),
        }),
      },
      'busy',
      'Starting',
      /^Starting: the ranks have run for 30 s, before the first step\.$/,
    ],
    [
      'a first step that takes too long',
      { job: job({ Boundary: 0, MaxBoundary: 0, BaseStep: 0, SecondaryStatusTransitions: running('running', 700) }) },
      'warn',
      'Stalled',
      /^Stalled: the ranks have run for 11 min 40 s without a step\.$/,
    ],
    [
      'before the first step after a failure',
      { job: job({ Boundary: 1200, BaseStep: 1200 }), incidents: [incident({ Phase: 'restore' })] },
      'busy',
      'Recovering',
      /^Recovering: the ranks have run for an unknown time, before the first new step\. Training had reached step 1,204\.$/,
    ],
    [
      'paused',
      { job: job({ SecondaryStatus: 'Paused', Reason: 'a user paused the job' }) },
      'idle',
      'Paused',
      /^Paused at step 1,204\. A user paused the job\.$/,
    ],
    [
      'pausing',
      { job: job({ SecondaryStatus: 'Pausing', Reason: 'a user paused it' }) },
      'busy',
      'Pausing',
      /^Pausing at step 1,204\. A user paused it\.$/,
    ],
    [
      'pausing during a recovery',
      { job: job({ SecondaryStatus: 'Pausing', Reason: '' }), incidents: [incident()] },
      'busy',
      'Recovering',
      /^Recovering: replacing nodes/,
    ],
    [
      'interrupted, in the queue',
      { job: interrupted('queued') },
      'warn',
      'Interrupted',
      /^Interrupted at step 1,204\. Place 1 in the queue\.$/,
    ],
    [
      'interrupted, collecting nodes',
      { job: interrupted('allocating') },
      'warn',
      'Interrupted',
      /^Interrupted at step 1,204\./,
    ],
    [
      'interrupted, returning nodes',
      { job: interrupted('pausing') },
      'warn',
      'Returning nodes',
      /^Returning nodes at step 1,204\./,
    ],
    [
      'queued',
      { job: job({ SecondaryStatus: 'Pending', Reason: 'needs 4 nodes; 0 of 8 are free' }) },
      'idle',
      'Queued',
      /^Queued\. Needs 4 nodes; 0 of 8 are free\.$/,
    ],
    [
      'the first launch',
      { job: job({ SecondaryStatus: 'Starting', Boundary: -1, Reason: 'starts the ranks' }) },
      'busy',
      'Starting',
      /^Starting\. Starts the ranks\.$/,
    ],
    [
      'stopping',
      { job: job({ TrainingJobStatus: 'Stopping', SecondaryStatus: 'Stopping', Reason: 'a user requested it' }) },
      'busy',
      'Stopping',
      /^Stopping at step 1,204\. A user requested it\.$/,
    ],
    [
      'completed',
      { job: job({ TrainingJobStatus: 'Completed', SecondaryStatus: 'Completed', Reason: 'every rank ended' }) },
      'good',
      'Completed',
      /^Completed after 1,204 steps\.$/,
    ],
    [
      'failed',
      { job: job({ TrainingJobStatus: 'Failed', FailureReason: 'rank 2 exits with 1', Reason: 'other' }) },
      'bad',
      'Failed',
      /^Failed at step 1,204\. Rank 2 exits with 1\.$/,
    ],
    [
      'failed with a traceback',
      {
        job: job({
          TrainingJobStatus: 'Failed',
          MaxBoundary: 0,
          Boundary: 0,
          FailureReason: 'error (1)\nTraceback\n  File\nRuntimeError: no',
        }),
      },
      'bad',
      'Failed',
      /^Failed\. Error \(1\)\. RuntimeError: no\.$/,
    ],
    [
      'stopped before the first step',
      { job: job({ TrainingJobStatus: 'Stopped', Reason: 'a user requested it', Boundary: -1, MaxBoundary: -1 }) },
      'idle',
      'Stopped',
      /^Stopped\. A user requested it\.$/,
    ],
    [
      'an answer without a status',
      { job: { TrainingJobName: 'gpt' } },
      'idle',
      'Unknown',
      /^The control plane has not reported a status/,
    ],
    [
      'an old answer',
      { staleSeconds: 40 },
      'idle',
      'Unknown',
      /^The control plane has not answered for 40 s\. Last known: Training at step 1,204\.$/,
    ],
    [
      'errors only',
      { staleSeconds: 40, refusal: 'the database is locked' },
      'idle',
      'Unknown',
      /^The control plane has returned errors for 40 s: The database is locked\. Last known: /,
    ],
    [
      'an old answer about an ended job',
      { job: job({ TrainingJobStatus: 'Completed' }), staleSeconds: 40 },
      'idle',
      'Completed',
      /^Completed after/,
    ],
  ]
  test.each(cases)('%s', (_, changes, tone, title, text) => {
    const { state } = all(changes)
    expect([state.title, state.tone]).toEqual([title, tone])
    expect(`${state.text} ${state.detail}`.trim()).toMatch(text)
  })
})

describe('the protection of a job', () => {
  const cases: [string, Partial<Facts>, string, string, string][] = [
    ['protected', {}, 'good', 'Protected', 'Any one node can fail without the loss of a step.'],
    [
      'degraded',
      {
        protection: protection({
          ProtectionState: 'Degraded',
          Reason: 'Rank 3 has 1 copy',
          Shards: [shard(), shard(1)],
        }),
      },
      'warn',
      'Degraded',
      'Degraded: rank 3 has 1 copy.',
    ],
    [
      'degraded without a reason',
      { protection: protection({ ProtectionState: 'Degraded' }) },
      'warn',
      'Degraded',
      'Degraded: some shards have too few copies.',
    ],
    [
      'one copy',
      { protection: protection({ RecoveryOdds: [{ LostNodes: 1, Probability: 0 }], Shards: [shard(1)] }) },
      'warn',
      'Protected',
      'The loss of one node loses the steps since the newest checkpoint in S3.',
    ],
    [
      'parity',
      { protection: protection({ Copies: 1, ParityGroupSize: 4 }) },
      'good',
      'Protected',
      'Any one node can fail without the loss of a step.',
    ],
    ['no odds reported', { protection: protection({ RecoveryOdds: [] }) }, 'good', 'Protected', 'Protected.'],
    [
      'two losses survived',
      {
        protection: protection({
          RecoveryOdds: [
            { LostNodes: 1, Probability: 1 },
            { LostNodes: 2, Probability: 1 },
          ],
        }),
      },
      'good',
      'Protected',
      'Any 2 nodes can fail without the loss of a step.',
    ],
    [
      'no commit',
      {
        job: job({ CommittedStep: -1 }),
        protection: protection({
          CommittedStep: -1,
          RecoveryOdds: [],
          LastCheckpoint: undefined,
          ProtectionState: 'Unprotected',
        }),
      },
      'bad',
      'Unprotected',
      'Unprotected: memory holds no committed step. No checkpoint is in S3.',
    ],
    [
      'no commit, but a checkpoint',
      {
        job: job({ CommittedStep: -1 }),
        protection: protection({ CommittedStep: -1, RecoveryOdds: [], ProtectionState: 'Unprotected' }),
      },
      'bad',
      'Unprotected',
      'Unprotected: memory holds no committed step. The checkpoint of step 1,200 is in S3.',
    ],
    [
      'no commit at the first step',
      {
        job: job({ Boundary: 1, MaxBoundary: 1, CommittedStep: -1 }),
        protection: protection({ CommittedStep: -1, RecoveryOdds: [], ProtectionState: 'Unprotected' }),
      },
      'idle',
      'Not yet protected',
      'Not yet protected: memory holds no committed step.',
    ],
    [
      'paused',
      {
        job: job({ SecondaryStatus: 'Paused' }),
        protection: protection({ ProtectionState: 'Unprotected', Shards: [], RecoveryOdds: [] }),
      },
      'idle',
      'Released',
      'The checkpoint of step 1,200 is in S3.',
    ],
    [
      'interrupted without a checkpoint',
      { job: interrupted('queued'), protection: protection({ LastCheckpoint: undefined }) },
      'warn',
      'Released',
      'No checkpoint is in S3.',
    ],
    ['no answer yet', { protection: undefined }, 'idle', 'Unknown', 'Protection is unknown.'],
    ['an answer without its fields', { protection: {} }, 'idle', 'Unknown', 'Protection is unknown.'],
    [
      'completed',
      { job: job({ TrainingJobStatus: 'Completed' }) },
      'idle',
      'Released',
      'The checkpoint of step 1,200 is in S3.',
    ],
    [
      'failed after its checkpoint',
      { job: job({ TrainingJobStatus: 'Failed' }) },
      'warn',
      'Released',
      '4 steps after the checkpoint of step 1,200 are lost.',
    ],
    [
      'failed one step after its checkpoint',
      { job: job({ TrainingJobStatus: 'Failed', Boundary: 1201, MaxBoundary: 1201 }) },
      'warn',
      'Released',
      '1 step after the checkpoint of step 1,200 is lost.',
    ],
    [
      'failed without a checkpoint',
      { job: job({ TrainingJobStatus: 'Failed' }), protection: protection({ LastCheckpoint: undefined }) },
      'bad',
      'Released',
      '1,204 steps are lost: no checkpoint is in S3.',
    ],
    [
      'failed at its checkpoint',
      { job: job({ TrainingJobStatus: 'Failed', Boundary: 1200, MaxBoundary: 1200 }) },
      'idle',
      'Released',
      'No step was lost: step 1,200 is in S3.',
    ],
    [
      'failed before a step',
      { job: job({ TrainingJobStatus: 'Failed', Boundary: 0, MaxBoundary: 0 }) },
      'idle',
      'Released',
      'No step was lost: the job had made none.',
    ],
    [
      'a silent holder',
      { job: job({ HealthyNodeCount: 3 }) },
      'warn',
      'Unconfirmed',
      'Protection is unconfirmed: 3 of 4 nodes are healthy.',
    ],
    [
      'an old answer',
      { staleSeconds: 60 },
      'idle',
      'Unknown',
      'Last known: Any one node can fail without the loss of a step.',
    ],
    [
      'a committed step without holders',
      {
        protection: protection({
          ProtectionState: 'Unprotected',
          Reason: 'Step 1203 was committed, but no rank has reported its holders.',
        }),
      },
      'bad',
      'Unprotected',
      'Unprotected: step 1203 was committed, but no rank has reported its holders.',
    ],
  ]
  test.each(cases)('%s', (_, changes, tone, title, text) =>
    expect(all(changes).protection).toEqual({ tone, title, text }),
  )
})

describe('the verdict in one line', () => {
  const short =
    'We currently do not have sufficient c7i.2xlarge capacity in the Availability Zone you requested (us-east-1a)'
  const retry = new Date((NOW + 120) * 1000).toISOString().slice(11, 19)
  const fleet: Partial<Fleet> = {
    FleetName: 'main',
    FleetStatus: 'active',
    InstanceType: 'c7i.2xlarge',
    AvailabilityZone: 'us-east-1a',
  }
  const CapacityWait: CapacityWait = {
    MissingNodeCount: 1,
    InstanceType: 'c7i.2xlarge',
    AvailabilityZone: 'us-east-1a',
    Message: short,
    IsOutOfCapacity: true,
    FailedAttemptCount: 2,
    NextAttemptTime: NOW + 120,
  }
  const cases: [string, Partial<Facts>, string, string][] = [
    [
      'training',
      {},
      'good',
      'Training at step 1,204. | Any one node can fail without the loss of a step. Nothing to do.',
    ],
    [
      'a shortage during a recovery',
      { job: job({ SecondaryStatus: 'Restarting', CapacityWait }), incidents: [incident()], fleet },
      'busy',
      `Recovering: waiting for 1 c7i.2xlarge in us-east-1a. | AWS is out of capacity; next attempt in 2 min. You need not act: Everstep tries again at ${retry.slice(0, 5)} UTC.`,
    ],
    [
      'a shortage before the first launch',
      {
        job: job({ SecondaryStatus: 'Starting', CapacityWait, Boundary: -1, MaxBoundary: -1, CommittedStep: -1 }),
        protection: protection({ CommittedStep: -1, ProtectionState: 'Unprotected', LastCheckpoint: undefined }),
        fleet,
      },
      'busy',
      `Starting: waiting for 1 c7i.2xlarge in us-east-1a. | AWS is out of capacity; next attempt in 2 min. You need not act: Everstep tries again at ${retry.slice(0, 5)} UTC.`,
    ],
    [
      'a recovery',
      { job: job({ SecondaryStatus: 'Restarting', Reason: '' }), incidents: [incident()] },
      'busy',
      'Recovering: replacing nodes for 10 s. | Nothing to do.',
    ],
    [
      'a recovery without protection',
      {
        job: job({ SecondaryStatus: 'Restarting', Reason: '' }),
        incidents: [incident()],
        protection: protection({ ProtectionState: 'Unprotected', Reason: 'no rank has reported its holders' }),
      },
      'busy',
      'Recovering: replacing nodes for 10 s. | Unprotected: no rank has reported its holders. Nothing to do.',
    ],
    [
      'a frozen fleet',
      { fleet: { FleetName: 'main', FleetStatus: 'frozen', Reason: '', Drift: [] } },
      'warn',
      'Training at step 1,204. | Any one node can fail without the loss of a step. Act now: find out why the fleet is frozen.',
    ],
    [
      'failed',
      { job: job({ TrainingJobStatus: 'Failed', FailureReason: 'rank 2 exits with 1' }) },
      'bad',
      'Failed at step 1,204. | Rank 2 exits with 1. 4 steps after the checkpoint of step 1,200 are lost. Act now: correct the cause, and submit the job again.',
    ],
    [
      'paused',
      { job: job({ SecondaryStatus: 'Paused', Reason: '' }) },
      'idle',
      'Paused at step 1,204. | The checkpoint of step 1,200 is in S3. Resume the job to continue.',
    ],
    [
      'queued',
      { job: job({ SecondaryStatus: 'Pending', Reason: 'place 2 of 2 in the queue' }) },
      'idle',
      'Queued. | Place 2 of 2 in the queue. Nothing to do.',
    ],
    [
      'completed',
      { job: job({ TrainingJobStatus: 'Completed' }) },
      'good',
      'Completed after 1,204 steps. | The checkpoint of step 1,200 is in S3. Nothing to do.',
    ],
    [
      'taken over',
      { job: job({ TakenOverTime: NOW, TakenOverBy: 'ada' }) },
      'good',
      'Training at step 1,204. | Any one node can fail without the loss of a step. Automation is off: a failure waits for ada.',
    ],
    [
      'a held node',
      { heldNodes: [HELD] },
      'good',
      'Training at step 1,204. | Any one node can fail without the loss of a step. Not urgent: inspect node i-a.',
    ],
    [
      'an old answer',
      { staleSeconds: 40 },
      'warn',
      'The control plane has not answered for 40 s. | Last known: Training at step 1,204. Act now: check the control plane.',
    ],
  ]
  test.each(cases)('%s', (_, changes, tone, text) => {
    const { line } = all(changes)
    expect([line.tone, `${line.lead} | ${line.text}`]).toEqual([tone, text])
  })
})

describe('the phase of a recovery', () => {
  test('is absent without an open incident', () => {
    expect(all({}).recovery).toBeUndefined()
    expect(all({ incidents: [closed(5, 'a')] }).recovery).toBeUndefined()
  })
  test('has its length, and the usual length after the same cause', () => {
    const { recovery } = all({ incidents: [closed(5, 'a'), closed(9, 'b'), closed(7, 'c'), incident()] })
    expect(recovery).toMatchObject({
      phase: 'replace',
      elapsedSeconds: 10,
      usualSeconds: 7,
      isLate: false,
      incidentId: 'inc-1',
    })
    expect(all({ incidents: [incident()] }).recovery).toMatchObject({ usualSeconds: undefined, isLate: false })
  })
  test('is late far beyond the usual length, and beyond a fixed limit without one', () => {
    const isLate = (...incidents: Incident[]) => all({ incidents }).recovery!.isLate
    const minute = incident({ FailedAt: NOW - 62, OpenedAt: NOW - 60 })
    expect([isLate(closed(5, 'a'), minute), isLate(minute)]).toEqual([true, false])
    expect(isLate(incident({ FailedAt: NOW - 400, OpenedAt: NOW - 398 }))).toBe(true)
  })
})

describe('a wait for capacity', () => {
  const short =
    'We currently do not have sufficient p5.48xlarge capacity in the Availability Zone you requested (us-east-2a). Launching EC2 instance failed'
  const midnight = Date.UTC(2026, 2, 1) / 1000
  const asks = (NextAttemptTime: number, now: number, changes: Partial<CapacityWait> = {}) =>
    all({
      job: job({
        SecondaryStatus: 'Starting',
        CapacityWait: {
          MissingNodeCount: 1,
          InstanceType: 'p5.48xlarge',
          AvailabilityZone: 'us-east-2a',
          Message: short,
          IsOutOfCapacity: true,
          FailedAttemptCount: 1,
          NextAttemptTime,
          ...changes,
        },
      }),
      now,
    }).act
  test('says what AWS lacks, when the next attempt is, and quotes AWS', () => {
    const nine = midnight + 9 * 3600 + 20 * 60
    expect(asks(nine + 19, nine + 7).text).toBe(
      `AWS has no p5.48xlarge capacity in us-east-2a. Everstep makes the next attempt in 12 s (09:20:19 UTC). AWS reports: “${short}.”`,
    )
    expect(asks(midnight + 300, midnight - 655).text).toMatch(/next attempt in 16 min \(00:05:00 UTC\)/)
    expect(asks(midnight - 60, midnight + 10).text).toMatch(/next attempt now \(23:59:00 UTC\)/)
    expect(asks(nine, midnight, { Message: 'You have no permission', IsOutOfCapacity: false }).text).toMatch(
      /^AWS launched no instance\..* AWS reports: “You have no permission\.”$/,
    )
    expect(asks(nine, midnight, { InstanceType: '', AvailabilityZone: '' }).text).toMatch(
      /^AWS has no instance capacity in this zone\./,
    )
  })
  test('that a person decides about has the title of a decision, and the recommended choice in its sentence', () => {
    const choice: IncidentAction = {
      Urgency: 'Later',
      Description: 'Continue on 2 nodes. It grows.',
      Command: 'x',
      FurtherCommands: [],
      IsRecommended: true,
      MinNodeCount: 2,
    }
    const wait = {
      MissingNodeCount: 1,
      InstanceType: 'p5',
      AvailabilityZone: 'us',
      Message: short,
      IsOutOfCapacity: true,
      FailedAttemptCount: 5,
      NextAttemptTime: midnight + 900,
    }
    const { act } = all({
      job: job({ SecondaryStatus: 'Restarting', CapacityWait: wait }),
      incidents: [incident()],
      actions: [choice],
      now: midnight,
    })
    expect([act.title, act.brief]).toEqual(['Decide', 'Recommended now: continue on 2 nodes.'])
    expect(act.steps.map(({ shrink }) => shrink)).toEqual([{ runId: 'run', nodes: 2 }])
  })
})

describe('what to do', () => {
  const suspended: Partial<Fleet> = {
    FleetName: 'main',
    AutoScalingGroupName: 'asg-1',
    FleetStatus: 'active',
    Reason: `waits for 1 instance: its group's Launch process is suspended (User suspended): ${RESUMED_BY_A_PERSON}`,
  }
  const frozen: Partial<Fleet> = {
    FleetName: 'main',
    FleetStatus: 'frozen',
    Reason: 'the group is not as needed',
    Drift: ['ReplaceUnhealthy is not suspended'],
  }
  const cases: [string, Partial<Facts>, boolean, RegExp][] = [
    ['training', {}, false, /^Everstep recovers the job by itself after a failure\.$/],
    [
      'recovering',
      { job: job({ SecondaryStatus: 'Restarting' }), incidents: [incident()] },
      false,
      /^Everstep recovers the job by itself\.$/,
    ],
    [
      'recovering for too long',
      {
        job: job({ SecondaryStatus: 'Restarting' }),
        incidents: [incident({ FailedAt: NOW - 400, OpenedAt: NOW - 398 })],
      },
      true,
      /longer than 5 min/,
    ],
    ['recovering in a frozen fleet', { incidents: [incident()], fleet: frozen }, true, /fleet is frozen/],
    [
      'training in a frozen fleet',
      { fleet: frozen },
      true,
      /^The fleet is frozen: Everstep replaces no lost instance\. The group is not as needed\.$/,
    ],
    ['failed', { job: job({ TrainingJobStatus: 'Failed' }) }, true, /does not start again by itself/],
    ['completed', { job: job({ TrainingJobStatus: 'Completed' }) }, false, /is complete/],
    [
      'recovering while a person has suspended launches',
      { incidents: [incident()], fleet: suspended },
      true,
      /^This recovery may need an instance, and the Auto Scaling group launches none\.$/,
    ],
    [
      'waiting for nodes while a person has suspended launches',
      { job: job({ SecondaryStatus: 'Pending' }), fleet: suspended },
      true,
      /^The job waits for nodes, and the Auto Scaling group launches none\.$/,
    ],
    [
      'stalled while a person has suspended launches',
      {
        progress: progress({ movedAt: NOW - 300 }),
        protection: protection({ CommittedAt: NOW - 300 }),
        fleet: suspended,
      },
      true,
      /make no steps/,
    ],
    [
      'training while a person has suspended launches',
      { fleet: suspended },
      true,
      /launches no instances: Everstep replaces no lost instance/,
    ],
    [
      'training while AWS has suspended launches',
      {
        fleet: {
          ...suspended,
          Reason: "its group's Launch process is suspended (…): AWS suspended it after failures and it is lifted",
        },
      },
      false,
      /recovers the job by itself/,
    ],
    [
      'completed in a frozen fleet',
      { job: job({ TrainingJobStatus: 'Completed' }), fleet: frozen },
      false,
      /is complete/,
    ],
    ['stopped', { job: job({ TrainingJobStatus: 'Stopped' }) }, false, /was stopped/],
    ['stopping', { job: job({ TrainingJobStatus: 'Stopping' }) }, false, /stop at the next step/],
    [
      'stalled',
      { progress: progress({ movedAt: NOW - 300 }), protection: protection({ CommittedAt: NOW - 300 }) },
      true,
      /make no steps/,
    ],
    ['at a third of its rate', { progress: progress({ rate: 0.6 }) }, true, /less than half/],
    ['at 60 % of its rate', { progress: progress({ rate: 1.2 }) }, false, /recovers the job by itself/],
    ['queued', { job: job({ SecondaryStatus: 'Pending' }) }, false, /^The job starts by itself when its turn comes\.$/],
    [
      'queued with a limit',
      { job: job({ SecondaryStatus: 'Pending', StoppingCondition: { MaxPendingTimeInSeconds: 7200 } }) },
      false,
      /It stops waiting in 1 h 00 min\.$/,
    ],
    ['before the first step', { job: job({ Boundary: 0, BaseStep: 0 }) }, false, /first step of a launch/],
    [
      'before the first commit',
      {
        job: job({ CommittedStep: -1, Boundary: 1, MaxBoundary: 1 }),
        protection: protection({ CommittedStep: -1, ProtectionState: 'Unprotected', LastCheckpoint: undefined }),
      },
      false,
      /^A failure now returns to the step from which this launch began\.$/,
    ],
    [
      'degraded',
      { protection: protection({ ProtectionState: 'Degraded' }) },
      false,
      /^Everstep makes the missing copies by itself\./,
    ],
    ['a silent holder', { job: job({ HealthyNodeCount: 3 }) }, false, /^Some nodes are silent or report a fault\./],
    [
      'one copy',
      { protection: protection({ RecoveryOdds: [{ LostNodes: 1, Probability: 0 }] }) },
      false,
      /^The job keeps one copy/,
    ],
    [
      'unprotected while it trains',
      { protection: protection({ ProtectionState: 'Unprotected' }) },
      true,
      /^A failure now goes back to S3 or to the start\.$/,
    ],
    ['starting', { job: job({ SecondaryStatus: 'Starting' }) }, false, /^The job starts by itself\.$/],
    ['no news', { staleSeconds: 40 }, true, /a recovery waits for it/],
    [
      'news of a failing server',
      { staleSeconds: 40, refusal: 'the database is locked' },
      true,
      /a recovery waits for it/,
    ],
    [
      'no news of a job that was done when there was some',
      { job: job({ TrainingJobStatus: 'Completed' }), staleSeconds: 40 },
      true,
      /a recovery waits for it/,
    ],
    [
      'paused',
      { job: job({ SecondaryStatus: 'Paused' }) },
      true,
      /^A person paused the job\. It does not continue by itself\. /,
    ],
    ['pausing', { job: job({ SecondaryStatus: 'Pausing' }) }, false, /waits for a person to resume it/],
    ['interrupted, and it queues', { job: interrupted('queued') }, false, /^The job continues from S3 by itself/],
    [
      'interrupted, and it still has its nodes',
      { job: interrupted('pausing') },
      false,
      /^The job returns its nodes to another job\./,
    ],
    ['a short silence', { staleSeconds: 14 }, false, /recovers the job by itself/],
  ]
  test.each(cases)('%s', (name, changes, needed, text) => {
    const { act } = all(changes)
    const isPaused = name === 'paused'
    expect(act.urgency).toBe(isPaused ? 'Later' : needed ? 'Now' : 'None')
    expect(act.title).toBe(isPaused ? 'Paused by a person' : needed ? 'Act now' : 'Nothing to do')
    const brief = isPaused ? /^Resume the job to continue\.$/ : needed ? /^Act now: .*\.$/ : /^Nothing to do\.$/
    expect(act.brief).toMatch(brief)
    expect(act.text).toMatch(text)
    expect(act.steps.length > 0).toBe(needed)
    expect(act.section === undefined || SECTIONS.has(act.section)).toBe(true)
    expect(act.section !== undefined || !needed).toBe(true)
  })
  test('lost nodes that are held are no urgent matter, and the job continues', () => {
    const { act } = all({ heldNodes: [HELD, { NodeId: 'i-b' }] })
    expect(act).toMatchObject({
      urgency: 'Later',
      title: 'Not urgent',
      tone: 'warn',
      section: 'held-node',
      brief: 'Not urgent: inspect node i-a.',
      steps: [
        { urgency: 'Later', text: 'Inspect node i-a.', nodeId: 'i-a', commands: ['look', 'terminate', 'release'] },
      ],
    })
    expect(act.text).toBe('Everstep recovers the job by itself after a failure.')
    expect(all({ heldNodes: [HELD, { ...HELD, NodeId: 'i-b' }] }).act.brief).toMatch(/decide about 2 nodes/)
    const failed = all({ job: job({ TrainingJobStatus: 'Failed' }), heldNodes: [HELD] }).act
    expect(failed).toMatchObject({ urgency: 'Now', section: 'failed' })
    expect(failed.steps.at(-1)).toMatchObject({ nodeId: 'i-a' })
  })
  test('a failed job has the steps that the API names for its incident, and a link that submits it again', () => {
    const actions = [
      { Urgency: 'Now', Description: 'Read.', Command: 'everstep jobs logs gpt', FurtherCommands: [] },
    ] as const
    const [first, ...rest] = all({ job: job({ TrainingJobStatus: 'Failed' }), actions: actions as never }).act.steps
    expect(first).toMatchObject({ text: 'Read.', commands: ['everstep jobs logs gpt'] })
    expect(first!.link).toEqual({ to: '/submit?from=run&checkpoint=1200', label: 'Then submit again from step 1,200…' })
    expect(rest).toEqual([])
  })
  test('a recovery without a control plane leaves an optional step, which the verdict names', () => {
    const step = {
      Urgency: 'Optional',
      Description: 'Find out why.',
      Command: 'everstep doctor',
      FurtherCommands: [],
    } as const
    const { act, line } = all({ actions: [step] as never })
    expect(act).toMatchObject({ urgency: 'Optional', title: 'You need not act', steps: [{ text: 'Find out why.' }] })
    expect(line.text).toMatch(/ Optional: find out why\.$/)
  })
  test('no step contains a placeholder', () => {
    const shown = cases.flatMap(([, changes]) =>
      all(changes).act.steps.flatMap((step) => [step.text, ...step.commands]),
    )
    expect(shown.length).toBeGreaterThan(10)
    expect(
      shown.filter((text) => /\b[A-Z]{2,}\b/.test(text.replace(/\b(?:AWS|S3)\b/g, '')) || /…| $/.test(text)),
    ).toEqual([])
  })
  test('the steps name the command, or what differs in AWS', () => {
    expect(all({ fleet: suspended }).act.steps[0]!.commands[0]).toContain(
      'aws autoscaling resume-processes --auto-scaling-group-name asg-1 ',
    )
    expect(readFileSync(join(import.meta.dirname, '../../control_plane/core/capacity.py'), 'utf8')).toContain(
      RESUMED_BY_A_PERSON,
    )
    expect(all({ fleet: frozen }).act.steps.map((step) => step.text)).toEqual([
      'Correct this in AWS: ReplaceUnhealthy is not suspended.',
    ])
  })
})

describe('a job that a person has taken over', () => {
  const taken = (changes: Partial<TrainingJob> = {}) =>
    job({
      TakenOverTime: NOW - 60,
      TakenOverBy: 'ada',
      Reason: 'taken over by ada: Everstep observes and decides nothing',
      ...changes,
    })
  test('with an open incident: nobody recovers it', () => {
    const told = all({ job: taken({ SecondaryStatus: 'Restarting' }), incidents: [incident()] })
    expect(told.act).toMatchObject({ urgency: 'Now', tone: 'bad', section: 'taken-over' })
    expect(told.act.text).toMatch(/^Nothing recovers this job: ada has taken it over, and its ranks do not train\.$/)
    expect(told.act.steps.at(-1)!.commands).toEqual(['everstep jobs hand-back gpt'])
    expect(told.state).toEqual({
      tone: 'bad',
      title: 'Not recovering',
      text: 'Not recovering: ada has taken over the job.',
      detail: 'Training had reached step 1,204.',
    })
  })
  test('with a failure, for which Everstep opens no incident', () => {
    const { act } = all({
      job: taken({ Reason: `taken over by ada: Everstep decides nothing${OBSERVED}i-a has ended` }),
    })
    expect(act).toMatchObject({ urgency: 'Now', tone: 'bad' })
    expect(act.text).toMatch(/and i-a has ended\.$/)
  })
  test.each([
    [{ TrainingJobStatus: 'Stopping', SecondaryStatus: 'Stopping' }, /asked to stop/],
    [{ SecondaryStatus: 'Pausing' }, /asked to pause/],
  ] as const)('a request waits: %o', (changes, text) => {
    expect(all({ job: taken(changes) }).act).toMatchObject({ urgency: 'Now', text: expect.stringMatching(text) })
  })
  test('that trains: a failure would wait', () => {
    expect(all({ job: taken() }).act).toMatchObject({
      urgency: 'Optional',
      tone: 'warn',
      text: expect.stringMatching(/^Automation is off: a failure waits for ada\.$/),
    })
  })
  test('that recomputes steps by itself', () =>
    expect(all({ job: taken(), incidents: [incident({ Phase: 'rework' })] }).state.title).toBe('Recomputing steps'))
  test('that has ended', () =>
    expect(all({ job: taken({ TrainingJobStatus: 'Completed' }) }).act.text).toBe('The job is complete.'))
})

describe('other jobs that the same fault has hit', () => {
  const other = (changes: Partial<Incident> = {}) =>
    incident({ RunId: 'other', TrainingJobName: 'other', FailedAt: NOW - 20, ...changes })
  const hit = (open: Incident | undefined, ...others: Incident[]) =>
    hitAlike(job(), open, [incident(), ...others], new Set(['other', 'third']))
  test('failed in the same way at the same time, over by now or not', () => {
    expect(
      hit(
        incident(),
        other(),
        other({ RunId: 'third', TrainingJobName: 'third', ClosedAt: NOW }),
        other({ IncidentId: 'again' }),
      ),
    ).toEqual(['other', 'third'])
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
  const taken = { TakenOverTime: NOW, TakenOverBy: 'ada' }
  const frozen: Partial<Fleet> = { FleetName: 'main', FleetStatus: 'frozen', Reason: 'blind', Drift: [] }
  test('are absent without a fact beyond the job', () => expect(all({}).banners).toEqual([]))
  test('do not repeat the card about what to do', () => {
    expect(all({ fleet: frozen }).banners).toEqual([])
    expect(all({ fleet: { FleetName: 'main', FleetStatus: 'active', Reason: RESUMED_BY_A_PERSON } }).banners).toEqual(
      [],
    )
    expect(all({ job: job(taken) }).banners).toEqual([])
  })
  test.each([
    [{ job: job(taken), fleet: frozen }, 'Fleet main is frozen: Everstep ends no instance of it. Blind.'],
    [
      {
        job: job({ SecondaryStatus: 'Paused' }),
        fleet: { FleetName: 'main', FleetStatus: 'active', Reason: RESUMED_BY_A_PERSON },
      },
      /^Fleet main launches no instances: /,
    ],
    [
      { job: job({ ...taken }), staleSeconds: 60 },
      'Automation is off for this job: ada has taken it over. Everstep makes no decision until the job is handed back.',
    ],
    [{ fleet: { FleetStatus: 'deleting' } }, 'The fleet is being deleted: Everstep ends its nodes one by one.'],
    [
      { othersHit: ['a', 'b'] },
      'More jobs failed: 2 other jobs of this fleet failed in the same way at the same time: a, b.',
    ],
    [{ othersHit: ['a'] }, /: 1 other job of this fleet failed/],
  ] as [Partial<Facts>, string | RegExp][])('%o', (changes, text) => {
    const banners = all(changes).banners.map((banner) => `${banner.title}: ${banner.text}`)
    expect(banners).toEqual([typeof text === 'string' ? text : expect.stringMatching(text)])
  })
})

describe('phases', () => {
  test('of a closed incident add up to the interruption', () => {
    const done = incident({
      Phase: 'closed',
      FailedAt: NOW - 20,
      OpenedAt: NOW - 18,
      ClosedAt: NOW - 4,
      DetectSeconds: 2,
      ReplaceSeconds: 5,
      RestoreSeconds: 6,
      ReworkSeconds: 3,
    })
    const lengths = phaseLengths(done, NOW)
    expect(lengths.map((each) => each.phase)).toEqual(['detect', 'replace', 'restore', 'rework'])
    expect(lengths.reduce((sum, each) => sum + each.seconds, 0)).toBe(16)
  })
  test.each([
    ['replace', 2],
    ['restore', 3],
    ['rework', 4],
  ] as const)('of an open one: %s is the last, and all add up to now', (phase, number) => {
    const lengths = phaseLengths(incident({ Phase: phase, ReplaceSeconds: 3, RestoreSeconds: 2 }), NOW)
    expect(lengths).toHaveLength(number)
    expect(lengths.at(-1)!.isOpen).toBe(true)
    expect(lengths.reduce((sum, each) => sum + each.seconds, 0)).toBe(12)
  })
})

test.each([
  [[0.07, 6.96], ['0.1 s', '6.9 s'], '7.0 s'],
  [[7.5, 12.4, 1.1], ['8 s', '12 s', '1 s'], '21 s'],
  [[0.5, 0.2, 16.4], ['1 s', '< 1 s', '16 s'], '17 s'],
  [[172.2, 1.1, 3.0], ['2 min 52 s', '1 s', '3 s'], '2 min 56 s'],
  [[20, 7180.5], ['< 1 min', '2 h 00 min'], '2 h 00 min'],
  [[20, 190_000], ['< 1 h', '2 d 5 h'], '2 d 5 h'],
  [[90_000, 90_000], ['25 h 00 min', '25 h 00 min'], '2 d 2 h'],
  [[0, 0], ['0.0 s', '0.0 s'], '0.0 s'],
])('phases of %j s have texts that add up to the text of their total', (seconds, texts, total) => {
  const phases = seconds.map((each) => ({ phase: 'detect' as Phase, seconds: each, isOpen: false }))
  expect(phaseTexts(phases)).toEqual(texts)
  expect(duration(seconds.reduce((sum, each) => sum + each))).toBe(total)
})

test('the newest open incident counts', () => {
  expect(openIncident([closed(1, 'a'), incident({ IncidentId: 'b' }), incident({ IncidentId: 'c' })])?.IncidentId).toBe(
    'c',
  )
  expect(openIncident(undefined)).toBeUndefined()
})

test('a usual rate needs steps and time', () => {
  expect(usualRate({ MaxBoundary: 100, AccountingSeconds: { train: 50 } })).toBe(2)
  expect(usualRate({ MaxBoundary: 100, AccountingSeconds: { train: 29 } })).toBeUndefined()
  expect(usualRate({ MaxBoundary: 9, AccountingSeconds: { train: 50 } })).toBeUndefined()
  expect(usualRate({})).toBeUndefined()
})
