// @vitest-environment jsdom
/** The rendered cards show the texts that the models compute, and offer no action that the state or role forbids. */
import { act, cleanup, fireEvent, screen, waitFor, within } from '@testing-library/react'
import { Route, Routes } from 'react-router'
import { describe, expect, test, vi } from 'vitest'

import { ApiError, call, contact } from '../src/api/client'
import type {
  Checkpoint,
  Duty,
  DutyAction,
  Fleet,
  HoldAdvice,
  Incident,
  Node,
  TrainingJob,
  TrainingJobSummary,
} from '../src/contract'
import { incidentFigures } from '../src/model/figures'
import { verdict, type Facts, type Verdict } from '../src/model/verdict'
import FleetPage from '../src/pages/Fleet'
import CheckpointsTab from '../src/pages/JobCheckpoints'
import QueuePage from '../src/pages/Queue'
import SubmitPage from '../src/pages/Submit'
import { Shown } from '../src/parts/Basics'
import ConfirmDialog from '../src/parts/ConfirmDialog'
import { ActCard } from '../src/parts/ActCard'
import { ActionButton } from '../src/parts/ActionButton'
import { LatestIncident } from '../src/parts/LatestIncident'
import NodeDialog from '../src/parts/NodeDialog'
import { Shell } from '../src/parts/Shell'
import { Stacks } from '../src/parts/Stacks'
import { StatusStrip } from '../src/parts/StatusStrip'
import { drawn, served } from './drawn'

const NOW = Math.floor(Date.now() / 1000)
const NOTHING: Duty = { Kind: 'Nothing', Urgency: 'None', Sentence: 'Nothing to do.', Actions: [] }
const job: Facts['job'] = {
  TrainingJobName: 'gpt',
  Duty: NOTHING,
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
  CreationTime: NOW - 3600,
  TrainingStartTime: NOW - 3500,
}
const shard = {
  Rank: 0,
  OwnerNodeId: 'i-a',
  CommittedStep: 1203,
  Bytes: 1,
  Reason: '',
  Holders: [
    { NodeId: 'i-a', InView: true },
    { NodeId: 'i-b', InView: true },
  ],
}
const protection: Facts['protection'] = {
  CommittedStep: 1203,
  CommittedAt: NOW - 1,
  ProtectionState: 'Protected',
  RecoveryOdds: [
    { LostNodes: 1, Probability: 1 },
    { LostNodes: 2, Probability: 0.93 },
  ],
  Shards: [shard],
}
const incident: Incident = {
  IncidentId: 'inc-1',
  Headline: 'A node reported a fault',
  TrainingJobName: 'gpt',
  Project: 'default',
  RunId: 'run',
  Cause: 'node_fault',
  Phase: 'replace',
  Outcome: 'Open',
  Evidence: ['Xid 79 on i-a'],
  EvidenceFacts: [],
  Decision: 'replace i-a',
  Why: 'GPU 5 failed.',
  Done: ['Everstep stopped all ranks.'],
  Reason: 'the plan follows',
  GenerationBefore: 1,
  RankSources: [],
  InstanceIds: ['i-a'],
  FaultedInstanceIds: ['i-a'],
  ReplacementInstanceIds: [],
  FailedAt: NOW - 12,
  OpenedAt: NOW - 10,
  DetectSeconds: 2,
}
const of = (changes: Partial<Facts> = {}): Verdict => verdict({ job, protection, incidents: [], now: NOW, ...changes })
const HOLD: HoldAdvice = {
  Decision: 'Terminate',
  Description: 'Terminate node i-a.',
  Command: 'everstep nodes release i-a --terminate',
  FurtherCommands: [],
}
const card = (name: string) => within(screen.getByRole('region', { name }))

describe('the card about what to do', () => {
  const action: DutyAction = {
    Kind: 'SubmitAgain',
    Urgency: 'Now',
    Description: 'Correct the cause.',
    Command: 'everstep jobs logs gpt --tail 50',
    FurtherCommands: [],
  }
  const failed: Duty = {
    Kind: 'JobFailed',
    Urgency: 'Now',
    Sentence: 'Act now: correct the cause, and submit the job again.',
    Explanation: 'The job does not start again by itself.',
    Actions: [action],
  }
  const drawCard = (duty: Duty, role = 'admin') => {
    const nodes = [{ NodeId: 'i-a', FleetName: 'main', NodeStatus: 'held', HoldAdvice: HOLD }]
    const answers = { '["nodes","main",false]': nodes }
    const { figures } = of()
    drawn(<ActCard duty={duty} figures={figures} runId="run" fleet="main" again="/submit?from=run" />, {
      role,
      answers,
    })
    return card('What to do')
  }
  test('shows the sentence and the actions of the server, and links the section of the runbook', () => {
    const act = drawCard(failed)
    act.getByRole('heading', { name: 'Act now' })
    act.getByText(`${failed.Sentence} ${failed.Explanation}`)
    expect(act.getAllByRole('listitem').map((item) => item.textContent)).toEqual([
      expect.stringMatching(/^Correct the cause\..*everstep jobs logs gpt --tail 50/),
    ])
    const links = act.getAllByRole('link').map((link) => [link.textContent, link.getAttribute('href')])
    expect(links).toContainEqual(['Submit again…', '/submit?from=run'])
    expect(links.map(([, href]) => href)).toContain('/runbook.html#failed')
  })
  test('offers each role only the buttons whose requests the server accepts', () => {
    const held = { ...action, Kind: 'DecideNode' as const, Urgency: 'Later' as const, InstanceId: 'i-a' }
    const shrink = { ...action, Kind: 'Shrink' as const, Description: 'Continue on 2 nodes.', MinNodeCount: 2 }
    const duty = { ...failed, Actions: [held, shrink] }
    for (const [role, terminates, continues] of [
      ['viewer', 0, 0],
      ['submitter', 0, 1],
      ['admin', 1, 1],
    ] as const) {
      const act = drawCard(duty, role)
      expect(act.queryAllByRole('button', { name: 'Terminate node…' })).toHaveLength(terminates)
      expect(act.queryAllByRole('button', { name: 'Continue on 2 nodes' })).toHaveLength(continues)
      expect(act.queryAllByRole('link', { name: 'Show the node' })).toHaveLength(1 - terminates)
      cleanup()
    }
    expect(drawCard(failed, 'viewer').queryByRole('link', { name: /submit again/ })).toBeNull()
  })
})

describe('the latest incident', () => {
  const drawIncident = (changes: Partial<Incident> = {}, role?: string) => {
    const shown = { ...incident, ...changes }
    const figures = incidentFigures(shown, NOW)
    return drawn(<LatestIncident incident={shown} figures={figures} job={{ FleetName: 'main' }} />, { role })
  }
  test('shows what failed, why, the response, the phases, and links', () => {
    drawIncident()
    const now = card('Open incident')
    for (const text of [
      'What failed',
      'Lost so far',
      'Why',
      'Response',
      'A node reported a fault',
      'GPU 5 failed.',
      'Everstep stopped all ranks.',
      'Details (1)',
      'steps',
      'Now',
      'Recovering',
    ])
      now.getByText(text)
    now.getByText(/Xid 79 on i-a\.$/)
    expect(now.getByRole('list', { name: 'Phases' }).textContent).toMatch(
      /^ detecting the failure 2 s replacing nodes 1\d s so far$/,
    )
    expect(now.getByRole('link', { name: 'Incident details' }).getAttribute('href')).toBe('/incidents/inc-1')
  })
  test('explains the button Acknowledge at the button', () => {
    drawIncident()
    expect(screen.getByRole('button', { name: 'Acknowledge' }).title).toMatch(/^Marks the incident as seen/)
  })
  test('claims no cause before the account of the incident arrives', () => {
    drawIncident({ Why: undefined, Done: undefined })
    expect(screen.getByText('Why').nextElementSibling!.querySelector('p')!.textContent).toBe('–')
    expect(screen.getByText('Response').nextElementSibling!.textContent).toBe('–')
  })
  test('is acknowledged with one click, and then names the person', async () => {
    const asked = served({ '/v1/incidents/inc-1/acknowledge': { body: {} } })
    drawIncident()
    fireEvent.click(screen.getByRole('button', { name: 'Acknowledge' }))
    await waitFor(() =>
      expect(asked.filter(({ method }) => method === 'POST')).toMatchObject([
        { path: '/v1/incidents/inc-1/acknowledge' },
      ]),
    )
    cleanup()
    drawIncident({ AcknowledgementTime: NOW, AcknowledgedBy: 'ada' })
    screen.getByText(/Acknowledged by ada/)
  })
  test('offers a viewer no button', () => {
    drawIncident({}, 'viewer')
    expect(screen.queryByRole('button')).toBeNull()
  })
})

test('the strip shows the status, the step, the rate, the protection, and whether to act', () => {
  drawn(<StatusStrip name="gpt" verdict={of()} rate="2.0 steps/s" />)
  expect(screen.getByRole('group', { name: 'Status of this job' }).textContent).toBe(
    'gptTrainingStep 1,204Rate 2.0 steps/sProtectedNothing to do',
  )
  screen.getByRole('heading', { level: 1, name: 'gpt' })
})

describe('the queue', () => {
  const line = (TrainingJobName: string, changes: Partial<TrainingJobSummary>) =>
    ({
      TrainingJobName,
      RunId: TrainingJobName,
      FleetName: 'main',
      SecondaryStatus: 'Training',
      NodeCount: 4,
      Priority: 0,
      CreationTime: NOW - 60,
      TrainingStartTime: NOW,
      Reason: '',
      ...changes,
    }) as TrainingJobSummary
  const described = (of: TrainingJobSummary, changes: Partial<TrainingJob>) =>
    ({ ...of, QueuedBehind: [], ...changes }) as unknown as TrainingJob
  const fleet = {
    FleetName: 'main',
    FleetStatus: 'active',
    NodeCount: 8,
    MaxNodeCount: 8,
    AutoScalingGroupName: 'group',
  } as Fleet
  const page = (jobs: TrainingJobSummary[], descriptions: TrainingJob[]) =>
    drawn(<QueuePage />, {
      answers: {
        '["jobs"]': jobs,
        '["fleets"]': [fleet],
        ...Object.fromEntries(descriptions.map((each) => [JSON.stringify(['job', each.TrainingJobName]), each])),
      },
    })
  const runs = line('runs', {})
  const paused = line('paused', { SecondaryStatus: 'Paused' })
  const interrupted = line('interrupted', { SecondaryStatus: 'Interrupted', Priority: 1 })
  const leaving = line('leaving', { SecondaryStatus: 'Interrupted' })
  const pending = line('pending', { SecondaryStatus: 'Pending', TrainingStartTime: undefined })

  test('lists pending and interrupted jobs with their positions and what would start them', () => {
    page(
      [pending, runs, paused, interrupted, leaving],
      [
        described(pending, {
          QueuePosition: 2,
          QueuedBehind: ['interrupted'],
          Reason: 'needs 4 nodes; jobs use 8 of at most 8 nodes',
        }),
        described(interrupted, { QueuePosition: 1, Reason: 'gave way' }),
        described(leaving, {}),
      ],
    )
    const rows = screen
      .getAllByRole('row')
      .slice(1)
      .map((row) => [...row.querySelectorAll('td')].map((cell) => cell.textContent))
    expect(rows.map((cells) => cells.slice(0, 3))).toEqual([
      ['1', 'interrupted', 'Interrupted'],
      ['2', 'pending', 'Queued'],
    ])
    expect(rows[1]![5]).toBe('Needs 4 nodes; jobs use 8 of at most 8 nodes.')
    expect(rows[1]![6]).toBe('interrupted')
    expect(rows[1]![7]).toMatch(
      /^The start of interrupted\.The end of runs \(4 nodes\), or of other jobs with as many nodes\./,
    )
    expect(rows[1]![7]).toMatch(/jobs use 8 of them/)
  })
  test('is empty if no job waits for nodes, even if a job is paused', () => {
    page([runs, paused], [])
    screen.getByRole('heading', { name: 'The queue is empty' })
  })
})

describe('the nodes of a fleet', () => {
  const node = (NodeId: string, CreationTime: number, NodeStatus = 'spare') =>
    ({
      NodeId,
      FleetName: 'main',
      CreationTime,
      NodeStatus,
      Reason: '',
      RefusedMessageCount: 0,
      RefusedSessionCount: 0,
    }) as unknown as Node
  const many = (count: number, status: string) =>
    Array.from({ length: count }, (_, each) => node(`i-${status === 'gone' ? 'e' : 'a'}${each}`, each, status))
  const living = many(4, 'spare')
  const fleet = {
    FleetName: 'main',
    FleetStatus: 'active',
    Duty: NOTHING,
    NodeCount: 4,
    DesiredNodeCount: 4,
    MaxNodeCount: 8,
    ConnectedNodeCount: 4,
    SpareCount: 0,
    MinNodeCount: 4,
    IncidentCount: 0,
    LostNodeCount: 0,
    CreationTime: NOW,
    ReplicaEncryption: 'Auto',
    EncryptsReplicas: true,
  }
  const ended = many(501, 'gone')
  const page = (at: string, changes: Partial<Fleet> = {}, nodes = living) =>
    drawn(
      <Routes>
        <Route path="/fleets/:name" element={<FleetPage />} />
      </Routes>,
      {
        at,
        role: 'viewer',
        answers: {
          '["fleets"]': [{ ...fleet, ...changes }],
          '["nodes","main",false]': nodes,
          '["nodes","main",true]': [...ended, ...living],
          '["nodes","one","i-e7"]': ended[7],
          '["events","","main"]': { events: [] },
        },
      },
    )
  const ids = () => [...document.querySelectorAll('tr[id]')].map((row) => row.id)
  test('encrypt their connections: the page shows the setting, and that it is in force', () => {
    page('/fleets/main')
    expect(screen.getByText('Replica encryption (TLS)').nextElementSibling!.textContent).toBe('Auto, in force')
  })
  test('show their image with its age, and their place in the network, where AWS reports them', () => {
    page('/fleets/main')
    expect(screen.queryByText('Network node') ?? screen.queryByText('Oldest image created')).toBeNull()
    cleanup()
    const days = (count: number) => NOW - count * 86_400
    const facts = { ImageId: 'ami-1', ImageCreationTime: days(41), FailureDomain: 'nn-1' }
    page('/fleets/main', { OldestImageTime: days(41) }, [{ ...living[0]!, ...facts }, living[1]!])
    expect(screen.getByText('Oldest image created').nextElementSibling!.textContent).toBe('41 d ago')
    const cells = (id: string) =>
      ['Network node', 'Node'].map((name) => document.querySelector(`#${id} [data-name="${name}"]`)!.textContent)
    expect(cells('i-a0')).toEqual(['nn-1', 'i-a0ami-1, created 41 d ago'])
    expect(cells('i-a1')).toEqual(['–', 'i-a1'])
  })
  test('include an ended node only if the URL names it', () => {
    page('/fleets/main#i-e7')
    expect(ids()).toEqual(['i-e7', 'i-a3', 'i-a2', 'i-a1', 'i-a0'])
    expect(screen.getByLabelText<HTMLInputElement>('Show ended nodes')).toMatchObject({
      checked: false,
      disabled: false,
    })
  })
  test('include ended nodes on request, 500 rows at a time', () => {
    page('/fleets/main?ended=1')
    expect([ids().length, ...ids().slice(0, 5)]).toEqual([500, 'i-a3', 'i-a2', 'i-a1', 'i-a0', 'i-e500'])
    fireEvent.click(screen.getByRole('button', { name: 'Show 5 more of 505' }))
    expect(ids()).toHaveLength(505)
  })
})

test('a running upload is shown with its share and its slowest rank, before the first checkpoint too', () => {
  const Upload = {
    Step: 1400,
    StoredBytes: 61,
    TotalBytes: 100,
    SlowestRank: 3,
    SlowestObject: 's3://b/rank=3',
    SlowestStoredBytes: 3 * 2 ** 29,
    SlowestTotalBytes: 2 ** 31,
  }
  const job = (activity: object) =>
    ({ TrainingJobName: 'gpt', CheckpointActivity: { Policy: 'every 100 steps', ...activity } }) as TrainingJob
  drawn(<CheckpointsTab job={job({ Upload })} />, { answers: { '["checkpoints","gpt"]': [] } })
  expect(screen.getByText('Uploading the checkpoint of step 1,400: 61 % (rank 3: 1.5 GiB of 2.0 GiB)')).toBeTruthy()
  cleanup()
  drawn(<CheckpointsTab job={job({})} />, { answers: { '["checkpoints","gpt"]': [] } })
  expect(screen.queryByText(/Uploading/)).toBeNull()
})

const kept = (Step: number, changes: Partial<Checkpoint>) =>
  ({
    Step,
    Generation: 1,
    Status: 'Complete',
    S3Uri: `s3://b/${Step}`,
    Bytes: 1,
    CreationTime: NOW,
    CompletionTime: NOW,
    IsPinned: false,
    Verification: 'NotVerified',
    ...changes,
  }) as Checkpoint

test('a damaged checkpoint shows its damage, and a checkpoint that nobody has verified says so', () => {
  const damaged = kept(30, {
    Verification: 'Damaged',
    VerificationTime: NOW,
    VerificationMessage: 'rank 1: the object is not there',
  })
  drawn(<CheckpointsTab job={{ TrainingJobName: 'gpt' } as TrainingJob} />, {
    answers: {
      '["checkpoints","gpt"]': [
        damaged,
        kept(20, { Verification: 'Intact', VerificationTime: NOW, IsPinned: true }),
        kept(10, {}),
      ],
    },
  })
  const rows = screen.getAllByRole('row').slice(1)
  expect(
    rows.map((row) => [...row.querySelectorAll('.status')].map((each) => [each.textContent, each.className])),
  ).toEqual([
    [
      ['Complete', 'status tone-bad'],
      ['Damaged', 'status tone-bad'],
    ],
    [
      ['Complete', 'status tone-good'],
      ['Intact', 'status tone-good'],
    ],
    [['Complete', 'status tone-good']],
  ])
  within(rows[0]!).getByText(/the object is not there/)
  within(rows[1]!).getByText('pinned')
  within(rows[2]!).getByText('not yet')
})

describe('actions on checkpoints', () => {
  const job = { TrainingJobName: 'gpt', RunId: 'run-7', TrainingJobStatus: 'InProgress' } as TrainingJob
  const list = [
    kept(40, { Status: 'Uploading' }),
    kept(30, { IsPinned: true, Verification: 'Verifying' }),
    kept(20, { Generation: 2, Verification: 'Damaged' }),
    kept(10, {}),
  ]
  const tab = (role: string, changes: Partial<TrainingJob> = {}, checkpoints = list) =>
    drawn(<CheckpointsTab job={{ ...job, ...changes }} />, { role, answers: { '["checkpoints","gpt"]': checkpoints } })
  const buttons = () => screen.getAllByRole('button').map((each) => each.getAttribute('aria-label') ?? each.textContent)
  const actions = () => buttons().filter((label) => !/^Copy|^s3/.test(label!))

  test('fit the state of each checkpoint', () => {
    tab('submitter')
    expect(actions()).toEqual([
      'Create a checkpoint',
      'Unpin step 30 of launch 1',
      'Verify step 20 of launch 2',
      'Pin step 20 of launch 2',
      'Delete step 20 of launch 2',
      'Verify step 10 of launch 1',
      'Pin step 10 of launch 1',
      'Delete step 10 of launch 1',
    ])
    cleanup()
    tab('submitter', { TrainingJobStatus: 'Completed' })
    expect(actions()[0]).toBe('Unpin step 30 of launch 1')
  })
  test('take checkpoints out of the trash', async () => {
    const asked = served({ '/v1/training-jobs/run-7/checkpoints/5/undelete': { body: {} } })
    const trashed = kept(5, { Status: 'Trashed', PurgeTime: 90_000, Bytes: 2048 })
    const answers = { '["checkpoints","gpt"]': list, '["checkpoints","gpt","trash"]': [trashed] }
    drawn(<CheckpointsTab job={job} />, { role: 'submitter', answers })
    expect(actions()).toContain('Undelete step 5 of launch 1')
    expect(actions()).not.toContain('Delete step 5 of launch 1')
    screen.getByText(/Their objects, 2.0 KiB, are still in S3/)
    fireEvent.click(screen.getByRole('button', { name: 'Undelete step 5 of launch 1' }))
    await waitFor(() => expect(asked.filter(({ method }) => method === 'POST')).toHaveLength(1))
  })
  test('are not offered to a viewer, who still sees the command that exports the newest complete checkpoint', () => {
    tab('viewer')
    expect(actions()).toEqual([])
    expect(screen.getAllByRole('columnheader')).toHaveLength(7)
    screen.getByText('everstep checkpoints export gpt 30 --to exported')
    cleanup()
    tab('viewer', {}, [kept(20, { Verification: 'Damaged' }), kept(10, {})])
    screen.getByText('everstep checkpoints export gpt 10 --to exported')
    cleanup()
    tab('viewer', {}, [kept(40, { Status: 'Uploading' })])
    expect(screen.queryByText(/checkpoints export/)).toBeNull()
  })
  test('name the run, the step and the generation', async () => {
    const path = '/v1/training-jobs/run-7/checkpoints'
    const asked = served({
      [`${path}/20/verify`]: { body: {} },
      [`${path}/20/pin`]: { body: {} },
      [`${path}/30/unpin`]: { status: 409, body: { Code: 'ConflictException', Message: 'the server is read-only' } },
    })
    tab('submitter')
    fireEvent.click(screen.getByRole('button', { name: 'Verify step 20 of launch 2' }))
    fireEvent.click(screen.getByRole('button', { name: 'Pin step 20 of launch 2' }))
    fireEvent.click(screen.getByRole('button', { name: 'Unpin step 30 of launch 1' }))
    await screen.findByText(/the server is read-only/)
    expect(asked.filter(({ method }) => method === 'POST')).toEqual([
      { method: 'POST', path: `${path}/20/verify`, body: {} },
      { method: 'POST', path: `${path}/20/pin`, body: {} },
      { method: 'POST', path: `${path}/30/unpin`, body: {} },
    ])
  })
  test('delete only after the user has typed the step', async () => {
    const asked = served({ '/v1/training-jobs/run-7/checkpoints/20': { body: {} } })
    tab('submitter')
    fireEvent.click(screen.getByRole('button', { name: 'Delete step 20 of launch 2' }))
    const box = await screen.findByRole('textbox', { name: 'Type step 20 to confirm' })
    const confirm = screen.getByRole('button', { name: 'Delete' })
    fireEvent.change(box, { target: { value: 'step 2' } })
    fireEvent.click(confirm)
    const changes = () => asked.filter(({ method }) => method !== 'GET')
    expect(changes()).toEqual([])
    fireEvent.change(box, { target: { value: 'step 20' } })
    fireEvent.click(confirm)
    await waitFor(() => expect(screen.queryByRole('textbox')).toBeNull())
    expect(changes()[0]).toEqual({ method: 'DELETE', path: '/v1/training-jobs/run-7/checkpoints/20', body: undefined })
  })
  test('show a requested step until the list contains the checkpoint', async () => {
    served({
      '/v1/training-jobs/run-7/checkpoints': {
        body: { TrainingJobName: 'gpt', RunId: 'run-7', Step: 45, Status: 'Requested' },
      },
    })
    const { client } = tab('submitter')
    fireEvent.click(screen.getByRole('button', { name: 'Create a checkpoint' }))
    await screen.findByText('Everstep stores step 45 or the next step.')
    act(() => void client.setQueryData(['checkpoints', 'gpt'], [kept(46, {}), ...list]))
    await waitFor(() => expect(screen.queryByText(/Everstep stores step 45/)).toBeNull())
  })
  test('are shown for 100 checkpoints at a time', () => {
    tab(
      'viewer',
      {},
      Array.from({ length: 230 }, (_, index) => kept(230 - index, {})),
    )
    expect(screen.getAllByRole('row')).toHaveLength(101)
    fireEvent.click(screen.getByRole('button', { name: 'Show 100 more of 230' }))
    fireEvent.click(screen.getByRole('button', { name: 'Show 30 more of 230' }))
    expect(screen.getAllByRole('row')).toHaveLength(231)
  })
})

describe('dialogs', () => {
  const ask = (onConfirm: () => Promise<unknown>, onClose = vi.fn()) => {
    drawn(
      <ConfirmDialog name="gpt" verb="Stop" onClose={onClose} onConfirm={onConfirm}>
        It does not start again.
      </ConfirmDialog>,
    )
    return {
      typed: (text: string) =>
        fireEvent.change(screen.getByLabelText(/^Type .* to confirm$/), { target: { value: text } }),
      button: () => screen.getByRole<HTMLButtonElement>('button', { name: 'Stop' }),
      onClose,
    }
  }
  test('confirm only after the user has typed the exact name', async () => {
    const confirm = vi.fn(() => Promise.resolve())
    const { typed, button, onClose } = ask(confirm)
    screen.getByText('It does not start again.')
    expect(button().disabled).toBe(true)
    typed('gp')
    fireEvent.submit(button().closest('form')!)
    expect(confirm).not.toHaveBeenCalled()
    typed('gpt')
    expect(button().disabled).toBe(false)
    fireEvent.submit(button().closest('form')!)
    await waitFor(() => expect(onClose).toHaveBeenCalledOnce())
    expect(confirm).toHaveBeenCalledOnce()
  })
  test('show a refusal and stay open', async () => {
    const { typed, button, onClose } = ask(() =>
      Promise.reject(new ApiError(409, 'ConflictException', 'it has ended', 'req-7')),
    )
    typed('gpt')
    fireEvent.submit(button().closest('form')!)
    const refusal = await screen.findByRole('alert')
    expect(refusal.textContent).toMatch(/The action failed.*it has ended.*Code ConflictException, request req-7/)
    expect(onClose).not.toHaveBeenCalled()
  })
  test('are not needed for an action that can be undone: its button acts at once and shows a refusal', async () => {
    const does = vi.fn(() => Promise.reject(new ApiError(409, 'ConflictException', 'the fleet is frozen')))
    drawn(
      <ActionButton operation="PauseTrainingJob" action={does}>
        Pause
      </ActionButton>,
    )
    fireEvent.click(screen.getByRole('button', { name: 'Pause' }))
    expect((await screen.findByRole('alert')).textContent).toMatch(/the fleet is frozen/)
    expect(does).toHaveBeenCalledOnce()
  })
  test('offer only the actions that the state of the node permits', () => {
    const node = (changes: object) =>
      ({ NodeId: 'i-a', FleetName: 'main', NodeStatus: 'held', Hold: 'inspection', Reason: '', ...changes }) as never
    const { unmount } = drawn(<NodeDialog node={node({})} onClose={() => {}} />)
    expect(screen.getAllByRole('radio').map((radio) => radio.getAttribute('value') ?? '')).toHaveLength(2)
    screen.getByLabelText(/^Terminate/)
    unmount()
    drawn(<NodeDialog node={node({ NodeStatus: 'assigned', Hold: undefined })} onClose={() => {}} />)
    expect(screen.queryByLabelText(/^Terminate/)).toBeNull()
    screen.getByLabelText(/^Drain/)
  })
})

describe('a submission that copies a job', () => {
  const earlier = (TrainingJobName: string, changes: Partial<TrainingJob>) =>
    ({
      TrainingJobName,
      RunId: TrainingJobName,
      FleetName: 'main',
      EntryPoint: 'train.py',
      NodeCount: 2,
      ...changes,
    }) as TrainingJob
  const gpt = earlier('gpt', {
    Source: { SourceId: 'a'.repeat(64) },
    RoleArn: 'arn:of:gpt',
    HyperParameters: { steps: '1' },
  } as Partial<TrainingJob>)
  const next = earlier('gpt-2', {
    Source: { SourceId: 'b'.repeat(64) },
    HyperParameters: { steps: '2' },
  } as Partial<TrainingJob>)
  const page = () => {
    const answers = new Map<string, (job: TrainingJob) => Promise<void>>()
    vi.stubGlobal(
      'fetch',
      (url: string) =>
        new Promise((answer) => answers.set(url, (job) => act(async () => answer(new Response(JSON.stringify(job)))))),
    )
    drawn(<SubmitPage />, { answers: { '["fleets"]': [], '["jobs"]': [gpt, next] } })
    return {
      type: (label: RegExp | string, value: string) =>
        fireEvent.change(screen.getByLabelText(label), { target: { value } }),
      answer: (job: TrainingJob) => answers.get(`/v1/training-jobs/${job.TrainingJobName}`)!(job),
      yaml: () => screen.getByLabelText<HTMLTextAreaElement>('YAML').value,
      parameters: () => screen.getByLabelText<HTMLTextAreaElement>('Hyperparameters').value,
    }
  }
  test('copies gpt-2 without settings of gpt, although gpt was typed first', async () => {
    const { type, answer, yaml, parameters } = page()
    type('Hyperparameters', 'typed=before')
    type('Copy from', 'gpt')
    await answer(gpt)
    expect(yaml()).toContain('arn:of:gpt')
    screen.getByText(/settings of gpt\./)
    type('Copy from', 'gpt-2')
    await answer(next)
    expect(yaml()).toContain('b'.repeat(64))
    expect(yaml()).not.toContain('arn:of:gpt')
    expect(parameters()).toBe('steps=2')
  })
  test('copies the job that was typed last, in any order of the answers', async () => {
    const { type, answer, yaml } = page()
    type('Copy from', 'gpt')
    type('Copy from', 'gpt-2')
    await answer(next)
    await answer(gpt)
    expect(yaml()).toContain('b'.repeat(64))
    screen.getByText(/settings of gpt-2\./)
  })
  test('shows the same hyperparameters in the field and in the YAML, also if the job is copied again', async () => {
    const { type, answer, yaml, parameters } = page()
    type('Copy from', 'gpt-2')
    await answer(next)
    type('Hyperparameters', 'steps=3')
    expect(yaml()).not.toContain('"3"')
    fireEvent.blur(screen.getByLabelText('Hyperparameters'))
    expect([parameters(), yaml()]).toEqual(['steps=3', expect.stringContaining('"3"')])
    type('Copy from', 'gpt')
    type('Copy from', 'gpt-2')
    await answer(next)
    expect([parameters(), yaml()]).toEqual(['steps=2', expect.stringContaining('"2"')])
  })
  test('takes hyperparameters from the YAML, and a field that loses the focus unchanged changes nothing', async () => {
    const { type, yaml, parameters } = page()
    const pass = () => fireEvent.blur(screen.getByLabelText('Hyperparameters'))
    type('Hyperparameters', 'steps=200')
    pass()
    type('YAML', yaml().replace('"200"', '"2000"'))
    expect(parameters()).toBe('steps=2000')
    pass()
    expect(yaml()).toContain('"2000"')
    type('YAML', '# mine\nHyperParameters: {steps: "5"}\n')
    pass()
    expect(yaml()).toMatch(/^# mine/)
    type('Hyperparameters', 'steps=5\nlr')
    pass()
    expect(parameters()).toBe('steps=5')
  })
  test('keeps an empty value of an environment variable', async () => {
    const { type } = page()
    const asked = served({ '/v1/training-jobs': { body: { Plan: undefined } } })
    type(
      'YAML',
      `TrainingJobName: mine\nSource: {SourceId: ${'c'.repeat(64)}}\nEntryPoint: train.py\nNodeCount: 1\nEnvironment: {CUDA_VISIBLE_DEVICES: ""}\n`,
    )
    fireEvent.click(screen.getByRole('button', { name: 'Show the plan' }))
    await waitFor(() =>
      expect(asked.map((each) => each.body)).toMatchObject([
        { Environment: { CUDA_VISIBLE_DEVICES: '' }, DryRun: true },
      ]),
    )
  })
})

test('the frame shows that the event stream is interrupted, but not before the first connection', () => {
  const stream: { onopen?: () => void; onerror?: () => void; addEventListener: () => void; close: () => void } = {
    addEventListener: () => {},
    close: () => {},
  }
  vi.stubGlobal(
    'EventSource',
    Object.assign(
      function () {
        return stream
      },
      { CLOSED: 2 },
    ),
  )
  const freshness = () => screen.queryByText(/^(Live|Polling|No answer)$/)?.textContent
  contact.at = Date.now()
  drawn(<Shell />, { answers: { '["incidents","","open"]': [] } })
  expect(freshness()).toBeUndefined()
  act(() => stream.onopen!())
  expect(freshness()).toBe('Live')
  act(() => stream.onerror!())
  expect(freshness()).toBe('Polling')
})

test('one refused request requests the session again, whoever sent it', async () => {
  const signedOut = vi.spyOn(contact, 'signedOut')
  served({ '/v1/training-jobs/run/pause': { status: 401, body: { Code: 'UnauthorizedException', Message: 'ended' } } })
  await expect(call('PauseTrainingJob', { TrainingJobName: 'run' })).rejects.toThrow('ended')
  expect(signedOut).toHaveBeenCalledOnce()
  expect(contact.isMissed).toBe(false)
})

test('the badge of the incidents explains its number', () => {
  vi.stubGlobal(
    'EventSource',
    Object.assign(
      function () {
        return { addEventListener: () => {}, close: () => {} }
      },
      { CLOSED: 2 },
    ),
  )
  drawn(<Shell />, { answers: { '["incidents","","open"]': [incident] } })
  expect(screen.getByText('1 open').title).toMatch(
    /^Open incidents of all jobs: .*An acknowledgement does not change the number\.$/,
  )
})

describe('data that could not be renewed', () => {
  const query = (data: string | undefined, error: unknown) => ({ data, error, refetch: vi.fn() })
  test('stays on the page, with a warning, the request id and a button to try again', () => {
    const asked = query('old figures', new ApiError(503, 'ServiceUnavailable', 'the database is locked', 'req-9'))
    drawn(<Shown query={asked}>{(data) => <p>{data}</p>}</Shown>)
    screen.getByText('old figures')
    expect(screen.getByRole('alert').textContent).toMatch(/What follows is not renewed.*the database is locked.*req-9/)
    fireEvent.click(screen.getByRole('button', { name: 'Try again' }))
    expect(asked.refetch).toHaveBeenCalledOnce()
  })
  test('has no warning after a successful request', () => {
    drawn(<Shown query={query('figures', null)}>{(data) => <p>{data}</p>}</Shown>)
    expect(screen.queryByRole('alert')).toBeNull()
  })
  test.each([
    [500, false],
    [503, false],
    [404, true],
    [200, true],
  ])('an answer with status %s counts as contact with the control plane: %s', async (status, isNews) => {
    served({ '/v1/training-jobs/gpt': { status, body: {} } })
    contact.at = 0
    await call('DescribeTrainingJob', { TrainingJobName: 'gpt' }).catch(() => {})
    expect(contact.at > 0).toBe(isNews)
  })
})

test('each folded stack names its ranks', () => {
  drawn(
    <Stacks
      event={{
        Detail: {
          stacks: [
            { ranks: [0, 1, 2], text: 'wait (data.py:7)' },
            { ranks: [3], text: 'read (disk.py:1)' },
          ],
        },
      }}
    />,
  )
  screen.getByText('Stack of ranks 0–2')
  screen.getByText('Stack of rank 3')
  screen.getByText('read (disk.py:1)')
})
