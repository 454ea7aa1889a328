/** The texts and buttons with which people act on jobs, nodes and drills. */
import { describe, expect, test } from 'vitest'

import type { Drill, Event, Node, TrainingJobPlan, TrainingJobRevision, TrainingJobSummary } from '../src/contract'
import { drillable, drillStatus, drillsVerdict } from '../src/model/drills'
import {
  actionsOf,
  arrangedNodes,
  exposures,
  nodeNotices,
  noticesIn,
  preselectedVerb,
  versionsOf,
} from '../src/model/nodes'
import { planned } from '../src/model/plan'
import { difference } from '../src/model/revisions'
import { FLEET } from '../src/words/fleets'

describe('the difference between revisions', () => {
  const revisions = [
    { Revision: 1, Time: 0, Changes: [] },
    {
      Revision: 2,
      Time: 1,
      Changes: [
        { Field: 'Priority', Before: '0', After: '5', Applies: 'Now' },
        { Field: 'Protection.Copies', Before: '2', After: '3', Applies: 'NextGeneration' },
      ],
    },
    {
      Revision: 3,
      Time: 2,
      Changes: [
        { Field: 'Priority', Before: '5', After: '0', Applies: 'Now' },
        { Field: 'StoppingCondition.MaxCostUsd', After: '10', Applies: 'Now' },
      ],
    },
    { Revision: 4, Time: 3, Changes: [{ Field: 'StoppingCondition.MaxCostUsd', Before: '10', Applies: 'Now' }] },
  ] as TrainingJobRevision[]
  const fields = (from: number, to: number) =>
    difference(revisions, from, to).map((each) => `${each.field}: ${each.before ?? '–'} → ${each.after ?? '–'}`)
  test.each([
    [1, 2, ['Priority: 0 → 5', 'Protection.Copies: 2 → 3']],
    [2, 3, ['Priority: 5 → 0', 'StoppingCondition.MaxCostUsd: – → 10']],
    [1, 3, ['Protection.Copies: 2 → 3', 'StoppingCondition.MaxCostUsd: – → 10']],
    [1, 4, ['Protection.Copies: 2 → 3']],
    [3, 3, []],
  ])('from %i to %i', (from, to, expected) => expect(fields(from, to)).toEqual(expected))
  test('says what waits for the next launch', () =>
    expect(difference(revisions, 1, 4)[0]!.applies).toBe('NextGeneration'))
})

describe('the plan of a dry run', () => {
  const plan: TrainingJobPlan = {
    FleetName: 'main',
    NodeCount: 4,
    RanksPerNode: 2,
    WorldSize: 8,
    Copies: 2,
    SlotsPerNode: 8,
    MemoryRatio: 4,
    NodeMemoryBytes: 2 ** 30,
    LargestShardBytes: 2 ** 27,
    RecoveryOdds: [
      { LostNodes: 1, Probability: 1 },
      { LostNodes: 2, Probability: 0.67 },
    ],
    CanStartNow: true,
    QueuedBehind: [],
    FreeNodeCount: 5,
    NodesToLaunch: 0,
    CostUsdPerHour: 98.4,
    ExpectedMttfSeconds: 7200,
    ExpectedRecoverySeconds: 12,
    ExpectedEttrRatio: 0.998,
  }
  test('that can start says so, with its price and odds', () => {
    const { start, facts } = planned(plan)
    expect(start).toMatchObject({ tone: 'good', title: 'The job would start now' })
    expect(Object.fromEntries(facts)).toMatchObject({
      Price: '$98.40/h',
      'Losses that memory survives': 'any one node: always; any 2 nodes: in 67 % of the cases',
      'Expected ETTR': '99.8 %',
      Ranks: '8: 4 nodes with 2 each',
    })
  })
  test('that has to wait says for what, behind whom, and what would come', () => {
    const { start } = planned({
      ...plan,
      CanStartNow: false,
      QueuePosition: 2,
      QueuedBehind: ['gpt'],
      WaitsFor: 'waits for 3 nodes',
      FreeNodeCount: 1,
      NodesToLaunch: 3,
    })
    expect(start.title).toBe('The job would be number 2 in the queue')
    expect(start.text).toBe(
      'Waits for 3 nodes. 1 node of main is free, and the job needs 4. Jobs ahead: gpt. The fleet would start 3 instances.',
    )
  })
  test('shows the memory of parity beside that of copies', () => {
    const facts = Object.fromEntries(
      planned({ ...plan, Copies: 1, ParityGroupSize: 4, MemoryRatio: 8 / 3, CopiesMemoryRatio: 4 }).facts,
    )
    expect(facts).toMatchObject({
      'Parity in memory': 'groups of 4 nodes',
      'Memory per node': '2.67 × the state of its ranks; 2 copies need 4.00 ×',
    })
    expect(facts).not.toHaveProperty('Copies in memory')
  })
  test('leaves out what a new fleet does not know', () =>
    expect(
      planned({
        ...plan,
        CostUsdPerHour: undefined,
        ExpectedMttfSeconds: undefined,
        ExpectedRecoverySeconds: undefined,
        ExpectedEttrRatio: undefined,
        LargestShardBytes: undefined,
        RecoveryOdds: [],
      }).facts.map(([name]) => name),
    ).toEqual(['Fleet', 'Ranks', 'Copies in memory']))
})

describe('nodes', () => {
  const verbs = (node: object) => actionsOf(node as Node).map((action) => action.verb)
  test.each([
    [{ NodeStatus: 'assigned' }, ['Drain', 'Replace', 'Reboot']],
    [{ NodeStatus: 'spare' }, ['Hold', 'Replace', 'Reboot']],
    [{ NodeStatus: 'held', Hold: 'inspection' }, ['Release', 'Terminate']],
    [{ NodeStatus: 'held', Hold: 'unreachable' }, ['Replace', 'Terminate']],
    [{ NodeStatus: 'assigned', Request: 'drain' }, ['Cancel request']],
    [{ NodeStatus: 'gone' }, []],
    [{ NodeStatus: 'joining' }, []],
    [{ NodeStatus: 'what a newer server says' }, []],
  ])('%o can be: %j', (node, expected) => expect(verbs(node)).toEqual(expected))
  test('only ending an instance ends one', () =>
    expect(
      actionsOf({ NodeStatus: 'held', Hold: 'person' })
        .filter((action) => action.terminate)
        .map((action) => action.verb),
    ).toEqual(['Terminate']))
  test('are sorted: the requested one, the current ones with the newest first, the former ones', () => {
    const node = (NodeId: string, CreationTime: number, NodeStatus = 'spare') =>
      ({ NodeId, CreationTime, NodeStatus }) as Node
    const [old, fresh, gone, lately] = [node('i-1', 1), node('i-2', 9), node('i-3', 2, 'gone'), node('i-4', 8, 'gone')]
    const order = (...of: Parameters<typeof arrangedNodes>) => arrangedNodes(...of).map((each) => each.NodeId)
    expect(order([old!, fresh!], [])).toEqual(['i-2', 'i-1'])
    expect(order([old!, fresh!], [old!, gone!, lately!])).toEqual(['i-2', 'i-1', 'i-4', 'i-3'])
    expect(order([old!, fresh!], [], gone)).toEqual(['i-3', 'i-2', 'i-1'])
    expect(order([old!, fresh!], [gone!, lately!], old)).toEqual(['i-1', 'i-2', 'i-4', 'i-3'])
    expect(arrangedNodes([old!], [node('i-1', 1, 'joining')])).toEqual([old])
  })
  test('that wait for a person are listed with the reason', () => {
    const nodes = [
      { NodeId: 'i-1', NodeStatus: 'held', Hold: 'inspection', Reason: 'xid 79' },
      { NodeId: 'i-2', NodeStatus: 'assigned', Request: 'drain', RequestReason: 'noisy' },
      { NodeId: 'i-3', NodeStatus: 'spare', Reason: '' },
    ] as Node[]
    expect(nodeNotices(nodes)).toEqual([
      { nodeId: 'i-1', title: 'Held: it failed and stays for inspection; a person decides', text: 'Xid 79.' },
      { nodeId: 'i-2', title: 'Requested: drain', text: 'Noisy.' },
    ])
  })
  test('that are open to jobs’ code are told together, by what it can get at', () => {
    const nodes = [
      { NodeId: 'i-1', NodeStatus: 'spare', Exposure: 'it can read keys' },
      { NodeId: 'i-2', NodeStatus: 'assigned' },
      { NodeId: 'i-3', NodeStatus: 'assigned', Exposure: 'it can read keys' },
      { NodeId: 'i-4', NodeStatus: 'gone', Exposure: 'it could' },
    ] as const
    expect(exposures(nodes)).toEqual([{ text: 'It can read keys.', nodeIds: ['i-1', 'i-3'] }])
  })
  test('have versions', () => {
    expect(
      versionsOf([
        { AgentVersion: '2', NodeStatus: 'spare' },
        { AgentVersion: '1', NodeStatus: 'spare' },
        { AgentVersion: '2', NodeStatus: 'assigned' },
        { AgentVersion: '0', NodeStatus: 'gone' },
        { AgentVersion: '', NodeStatus: 'joining' },
      ]),
    ).toBe('1 on 1 node, 2 on 2 nodes')
    expect(versionsOf([])).toBe('no agent has joined')
  })
  test('what AWS announced comes newest first, and nothing else', () => {
    const events = [
      ['NoticeReceived', 1],
      ['NodeJoined', 2],
      ['NodesToBeLeft', 3],
    ].map(([Type, EventId]) => ({ Type, EventId })) as Event[]
    expect(noticesIn(events).map((event) => event.EventId)).toEqual([3, 1])
    expect(noticesIn(events, 1)).toHaveLength(1)
  })
})

describe('drills', () => {
  const job = (changes: object) =>
    ({
      FleetName: 'main',
      TrainingJobStatus: 'InProgress',
      SecondaryStatus: 'Training',
      ...changes,
    }) as TrainingJobSummary
  test('run on jobs that train, on fleets that allow drills', () => {
    expect(drillable([job({})], ['main'])).toHaveLength(1)
    expect(drillable([job({})], [])).toEqual([])
    const others = [job({ SecondaryStatus: 'Restarting' }), job({ TrainingJobStatus: 'Stopping' })]
    expect(drillable(others, ['main'])).toEqual([])
  })
  test('have a tone and a word for every status, also for one of a newer server', () => {
    expect(drillStatus('recovered')).toEqual({ tone: 'good', word: 'recovered' })
    expect(drillStatus('newer')).toEqual({ tone: 'idle', word: 'newer' })
  })
  test.each([
    [[], ['main'], 'idle', 'No drill has run yet. Drills are allowed on main.'],
    [['recovered'], [], 'good', 'The job recovered from the last drill. No fleet allows drills.'],
    [
      ['recovered', 'not_recovered'],
      ['a', 'b'],
      'bad',
      'The last drill ended without a recovery. Drills are allowed on a, b.',
    ],
    [['absorbed'], ['a'], 'good', 'The last drill caused no incident. Drills are allowed on a.'],
    [['not_done'], ['a'], 'idle', 'The last drill was not carried out. Drills are allowed on a.'],
    [['requested', 'struck', 'recovered'], ['a'], 'busy', '2 drills run. Drills are allowed on a.'],
  ])('%j: one sentence', (statuses, allowed, tone, sentence) => {
    const line = drillsVerdict(
      statuses.map((DrillStatus) => ({ DrillStatus }) as Drill),
      allowed,
    )
    expect([line.tone, `${line.lead} ${line.text}`]).toEqual([tone, sentence])
  })
})

test.each([
  [{ NodeStatus: 'assigned' }, 'Drain'],
  [{ NodeStatus: 'spare' }, 'Hold'],
  [{ NodeStatus: 'assigned', Request: 'drain' }, 'Cancel request'],
  [{ NodeStatus: 'held', Hold: 'unreachable' }, undefined],
  [{ NodeStatus: 'held', Hold: 'unreachable', HoldAdvice: { Decision: 'Terminate' } }, 'Terminate'],
  [{ NodeStatus: 'held', Hold: 'person', HoldAdvice: { Decision: 'Release' } }, 'Release'],
  [{ NodeStatus: 'held', Hold: 'inspection', HoldAdvice: { Decision: 'Terminate' } }, 'Terminate'],
  [{ NodeStatus: 'held', Hold: 'inspection', HoldAdvice: { Decision: 'Inspect' } }, undefined],
  [{ NodeStatus: 'gone' }, undefined],
])('the dialog of %o begins with %s', (node, verb) => expect(preselectedVerb(node as Node)).toBe(verb))

test.each([
  ['Auto', false, 'Auto, not in force: EC2 encrypts the traffic'],
  ['Auto', true, 'Auto, in force'],
  ['On', true, 'On, in force'],
  ['Off', false, 'Off, not in force'],
])('the encryption %s of replicas says whether it is in force: %s', (setting, isInForce, words) => {
  expect(FLEET.encryption(setting, isInForce)).toBe(words)
})
