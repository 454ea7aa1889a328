// @vitest-environment jsdom
/** The page of one incident shows the verdict, what to do, the timeline, and what people add (owner, notes). */
import { cleanup, fireEvent, screen, waitFor, within } from '@testing-library/react'
import { Route, Routes } from 'react-router'
import { expect, test, vi } from 'vitest'

import type { DutyAction, Event, Incident, LogEvent, Node, SimilarIncident } from '../src/contract'
import IncidentPage from '../src/pages/Incident'
import { contact } from '../src/api/client'
import { drawn, served } from './drawn'

const NOW = Math.floor(Date.now() / 1000)
const incident: Incident = {
  IncidentId: 'inc-1',
  Headline: 'The ranks hung',
  TrainingJobName: 'gpt',
  Project: 'default',
  RunId: 'run',
  Cause: 'hang',
  Phase: 'closed',
  Evidence: ['hang: all 4 ranks stood still', 'b', 'c', 'd'],
  EvidenceFacts: [],
  Decision: 'restart all ranks',
  Reason: '',
  GenerationBefore: 1,
  GenerationAfter: 2,
  RankSources: [],
  InstanceIds: ['i-a'],
  FaultedInstanceIds: ['i-a'],
  ReplacementInstanceIds: [],
  FailedAt: NOW - 100,
  OpenedAt: NOW - 40,
  ClosedAt: NOW - 20,
  DetectSeconds: 60,
  FromStep: 10,
  ReachedStep: 12,
  LostSteps: 2,
  RestoreSource: 'peer',
  Outcome: 'Recovered',
  Verdict: 'The ranks made no progress and hung. Everstep recovered the job in 80 s.',
  Actions: [],
  DutySentence: 'Nothing to do.',
  Milestones: [
    { Kind: 'Failed', Time: NOW - 100, Description: 'The failure occurred.' },
    { Kind: 'Detected', Time: NOW - 40, Description: 'Everstep detected the failure.' },
    { Kind: 'Replaced', Time: NOW - 30, Description: 'i-b was ready in place of i-a.' },
    { Kind: 'Closed', Time: NOW - 20, Description: 'Training had caught up.' },
  ],
  Notes: [],
  Why: 'Cause unknown: all 4 ranks stood still.',
  Done: ['Everstep restarted all ranks.', 'Training resumed from step 10.'],
}
const action = (changes: Partial<DutyAction>): DutyAction => ({
  Kind: 'Pause',
  Urgency: 'Optional',
  Description: '',
  Command: '',
  FurtherCommands: [],
  ...changes,
})
const look = (EventId: number, Time: number, Type: string, text: string): Event => ({
  EventId,
  Time,
  Type,
  Message: text,
  Detail: { stacks: [{ ranks: [0, 1], text }] },
})
const line = (Rank: number, Message: string): LogEvent => ({
  Timestamp: NOW - 101,
  Generation: 1,
  NodeId: 'i-a',
  Rank,
  Stream: 'stdout',
  Message,
})
const similar: SimilarIncident = {
  IncidentId: 'inc-0',
  TrainingJobName: 'gpt',
  RunId: 'run',
  FleetName: 'main',
  OpenedAt: NOW - 5000,
  Outcome: 'JobFailed',
  Decision: '',
  FaultedInstanceIds: ['i-a'],
  Likeness: ['Instance', 'Fleet'],
}

function page(changes: Partial<Incident> = {}, { job = {}, role = 'admin' }: { job?: object; role?: string } = {}) {
  const shown = { ...incident, ...changes }
  return drawn(
    <Routes>
      <Route path="/incidents/:id" element={<IncidentPage />} />
    </Routes>,
    {
      at: '/incidents/inc-1',
      role,
      answers: {
        '["incident","inc-1"]': shown,
        '["incident","inc-1","similar"]': [similar],
        '["job","gpt"]': { TrainingJobName: 'gpt', RunId: 'run', FleetName: 'main', ...job },
        [JSON.stringify(['events', 'gpt', 'around', 'inc-1', shown.ClosedAt])]: [
          look(2, NOW - 60, 'RanksStandStill', 'the first look'),
          look(3, NOW - 40, 'RanksHang', 'the proof'),
        ],
        [JSON.stringify(['printed', 'inc-1', shown.FailedAt])]: [
          line(0, 'step 7'),
          line(1, '\u001b[31mwaits\u001b[0m'),
        ],
      },
    },
  )
}
const card = (name: string) => within(screen.getByRole('region', { name }))

test('the head says what happened and whether to act', () => {
  page()
  screen.getByRole('heading', { level: 1, name: 'The ranks hung' })
  expect(screen.getByRole('status').textContent).toBe('Nothing to do.')
  expect(screen.getByRole('link', { name: 'Runbook' }).getAttribute('href')).toBe('/runbook.html#hang')
  screen.getByText('Recovered')
  screen.getByText('Cause unknown: all 4 ranks stood still.')
  screen.getByText('Everstep restarted all ranks.')
  const details = screen.getByText('Details (5)').closest('details')!
  expect(details.open).toBe(false)
  expect(details.textContent).toMatch(/Training resumed from step 10\.Hang: all 4 ranks stood still\./)
  card('What to do').getByText(/^Nothing\./)
})

test('an urgent action leads the verdict and shows its command', () => {
  page({
    Outcome: 'JobFailed',
    DutySentence: 'Act now: correct the script.',
    Actions: [
      action({ Urgency: 'Now', Description: 'Correct the script. Then run it.', Command: 'everstep jobs logs gpt' }),
    ],
  })
  screen.getByText('Job failed', { selector: '.head .status' })
  screen.getByText('downtime')
  expect(screen.getByRole('status').textContent).toBe('Act now: correct the script.')
  expect(screen.getByRole('status').getAttribute('data-tone')).toBe('bad')
  card('What to do').getByText('Correct the script. Then run it.')
  card('What to do').getByText('everstep jobs logs gpt')
})

const Wait = {
  MissingNodeCount: 1,
  InstanceType: 'p5.48xlarge',
  AvailabilityZone: 'us-east-2a',
  NextAttemptTime: NOW + 720,
  Message: 'We do not have sufficient p5.48xlarge capacity (a). Launching EC2 instance failed',
  IsOutOfCapacity: true,
  FailedAttemptCount: 5,
}
const DECIDE = 'Decide: wait for the next attempt at 01:10:09 UTC, or (recommended) continue on 2 nodes.'
const waiting: Partial<Incident> = {
  ClosedAt: undefined,
  Phase: 'replace',
  Outcome: 'Open',
  LostSteps: undefined,
  FromStep: undefined,
  Wait,
  Verdict: 'i-a was terminated.',
}

test('a long shortage leads with the recommendation and the next attempt, in amber, and quotes AWS', async () => {
  const choices = ['Continue on 2 nodes. It grows.', 'Pause the job, so that others run.']
  const Actions = choices.map((Description, index) =>
    action({
      Urgency: 'Later',
      Description,
      Command: `command ${index}`,
      ...(index === 0 ? { IsRecommended: true, MinNodeCount: 2 } : {}),
    }),
  )
  const asked = served({ '/v1/training-jobs/run': { body: {} } })
  page({
    ...waiting,
    Actions,
    DutySentence: DECIDE,
    CostUsd: 7,
    ContinuingCost: 'Waiting costs $110.08 per hour for 2 idle nodes.',
  })
  const head = screen.getByRole('status')
  expect(head.getAttribute('data-tone')).toBe('warn')
  expect(head.textContent).toBe(DECIDE)
  screen.getByTitle('for nodes that did not train')
  screen.getByText('downtime')
  expect(screen.getByText('Recovering').className).toBe('status tone-warn')
  expect(screen.queryByText('Now')).toBeNull()
  const todo = card('What to do')
  expect(todo.getByText('Waiting costs $110.08 per hour for 2 idle nodes.').closest('details')!.open).toBe(false)
  todo.getByText('Recommended')
  todo.getByText('Continue on 2 nodes. It grows.')
  const undecided = todo.getByText('If nobody decides, Everstep tries again every 15 min.')
  expect(undecided.closest('details')!.open).toBe(false)
  expect(todo.queryByText('command 0')).toBeNull()
  fireEvent.click(todo.getByRole('button', { name: 'Continue on 2 nodes' }))
  await waitFor(() =>
    expect(asked.map(({ method, path, body }) => [method, path, body])).toContainEqual([
      'POST',
      '/v1/training-jobs/run',
      { ElasticConfig: { MinNodeCount: 2 } },
    ]),
  )
  expect(todo.getByText('Other choices (1)').closest('details')!.textContent).toContain('Pause the job')
  expect(todo.queryByText('Not urgent')).toBeNull()
})

test('without a recommended choice, the recommendation of a long shortage is to wait', () => {
  page({ ...waiting, Actions: [action({ Urgency: 'Later', Description: 'Pause the job, so that others run.' })] })
  card('What to do').getByText('Wait for the next attempt (recommended).')
  expect(card('What to do').getByText('Other choices (1)').closest('details')!.open).toBe(false)
})

test('a short wait demands nothing, although it has choices', () => {
  const Actions = [action({ Description: 'Pause the job, so that others run.', Command: 'everstep jobs pause gpt' })]
  const DutySentence = 'Nothing to do: the next attempt is at 01:10:09 UTC.'
  page({ ...waiting, Wait: { ...Wait, NextAttemptTime: NOW + 30 }, Actions, DutySentence })
  const head = screen.getByRole('status')
  expect(head.textContent).toBe(DutySentence)
  expect(head.getAttribute('data-tone')).toBe('busy')
  expect(screen.getByText('Recovering').className).toBe('status tone-busy')
  card('What to do').getByText('Optional (1)')
  expect(card('What to do').queryByText('Optional')).toBeNull()
})

test('a held node is no choice during a wait', () => {
  const held = action({ Urgency: 'Later', Description: 'Terminate node i-a. It is silent.', InstanceId: 'i-a' })
  page({ ...waiting, Headline: 'A node failed', Actions: [held, action({ Description: 'Pause the job.' })] })
  expect(screen.getByRole('status').getAttribute('data-tone')).toBe('busy')
  expect(screen.getByText('Recovering').className).toBe('status tone-busy')
})

test('a shortage without a choice has nothing to do until the next attempt', () => {
  page({ ...waiting, Wait: { ...Wait, NextAttemptTime: NOW - 5 } })
  screen.getByText('Recovering')
  card('What to do').getByText(/^Nothing\./)
})

test('the button Acknowledge has an explanation', () => {
  const note = 'Marks the incident as seen, and changes nothing else.'
  page()
  expect(screen.getByRole('button', { name: 'Acknowledge' }).title).toBe(note)
  cleanup()
  page({ ClosedAt: undefined, Outcome: 'Open' })
  expect(screen.getByRole('button', { name: 'Acknowledge' }).title).toBe(note)
  cleanup()
  page({ AcknowledgementTime: NOW - 5, AcknowledgedBy: 'ann' })
  expect(screen.queryByRole('button', { name: 'Acknowledge' })).toBeNull()
  card('Owner and notes').getByText(/^Acknowledged by ann/)
})

test.each([
  ['Restarting ranks', { InstanceIds: [], ReplacementInstanceIds: [] }],
  ['Replacing nodes', { InstanceIds: [], ReplacementInstanceIds: ['i-b'] }],
  ['Replacing nodes', { InstanceIds: ['i-a'], ReplacementInstanceIds: [] }],
  ['Waiting for nodes', { InstanceIds: ['i-a'], ReplacementInstanceIds: [], NodeCountBefore: 4, NodeCountAfter: 3 }],
  ['Without a control plane', { ControlPlaneAbsentSeconds: 45 }],
  ['Detecting the failure', { ControlPlaneAbsentSeconds: 20 }],
])('a phase has the name of what happened: %s', (name, changes) => {
  page({ ReplaceSeconds: 7, ...changes })
  const phases = card('Recovery')
  phases.getByText(name)
  expect(phases.getByRole('img').getAttribute('aria-label')!.toLowerCase()).toContain(name.toLowerCase())
})

test('an absence of the control plane has its own color', () => {
  page({ ControlPlaneAbsentSeconds: 45, ReplaceSeconds: 7 })
  const keys = [...document.querySelectorAll<HTMLElement>('.legend .key')].map((key) => key.style.background)
  expect(keys.slice(0, 3)).toEqual(['var(--b-unaccounted)', 'var(--b-detect)', 'var(--b-replace)'])
})

test('an open incident shows its phase, and an optional action demands nothing', () => {
  page({
    ClosedAt: undefined,
    Phase: 'replace',
    Outcome: 'Open',
    LostSteps: undefined,
    FromStep: undefined,
    Actions: [action({ Description: 'See it.', Command: 'everstep jobs describe gpt' })],
  })
  expect(screen.getByRole('status').getAttribute('data-tone')).toBe('busy')
  screen.getByText('Recovering')
  screen.getByText('replacing nodes', { selector: '.status' })
  screen.getByText(/^Everstep is replacing nodes, for /)
  screen.getByText('steps')
})

test('a held node is decided about on the page', async () => {
  const node = { NodeId: 'i-a', FleetName: 'main', NodeStatus: 'held', Hold: 'inspection' } as Node
  const { client } = page({
    Actions: [
      action({
        Urgency: 'Later',
        Description: 'Inspect node i-a.',
        InstanceId: 'i-a',
        Command: 'everstep nodes describe i-a',
        FurtherCommands: ['everstep nodes release i-a --terminate', 'everstep nodes release i-a'],
      }),
    ],
  })
  expect(screen.getByRole('status').getAttribute('data-tone')).toBe('idle')
  for (const command of ['describe i-a', 'release i-a --terminate', 'release i-a']) {
    card('What to do').getByText(`everstep nodes ${command}`)
  }
  card('What to do').getByRole('link', { name: 'Show the node' })
  client.setQueryData(['nodes', 'main', false], [node])
  fireEvent.click(await card('What to do').findByRole('button', { name: 'Terminate or release node…' }))
  await screen.findByRole('dialog', { name: 'Act on i-a' })
})

test('while the control plane does not answer, the page does not say that nothing is to do', () => {
  contact.at = Date.now() - 60_000
  page()
  const head = screen.getByRole('status')
  expect([head.textContent, head.getAttribute('data-tone')]).toEqual(['Last known: Nothing to do.', 'idle'])
  contact.at = Date.now()
})

test('a failed job is submitted again from its checkpoint', async () => {
  const job = { TrainingJobStatus: 'Failed', SecondaryStatus: 'Failed', MaxBoundary: 12, TrainingEndTime: NOW - 20 }
  const urgent = action({
    Kind: 'SubmitAgain',
    Urgency: 'Now',
    Description: 'Read the last lines.',
    Command: 'everstep jobs logs gpt',
  })
  const { client } = page({ Outcome: 'JobFailed', Actions: [urgent], LostSteps: 0 }, { job })
  // No answer about checkpoints has arrived, so the page shows a dash in place of the number of lost steps.
  expect(document.querySelector('.losses li')!.textContent).toBe('– steps')
  client.setQueryData(['protection', 'gpt'], { LastCheckpoint: { Step: 10 } })
  const link = await card('What to do').findByRole('link', { name: 'Submit again…' })
  expect(link.getAttribute('href')).toBe('/submit?from=run&checkpoint=10')
  expect(document.querySelector('[data-figure="unsaved-steps"]')!.textContent).toBe('2')
  screen.getByText('All steps after step 10 are lost: no checkpoint in S3 has them.')
})

test('the timeline has milestones, events, log lines, stacks and notes in the order of time', () => {
  page({ Notes: [{ NoteId: 1, Author: 'ann', CreationTime: NOW - 10, Text: 'The switch\nfailed.' }] })
  const timeline = card('Timeline')
  const entries = timeline.getAllByRole('listitem').map((each) => each.querySelector('.what')!.textContent)
  expect(entries).toEqual([
    expect.stringMatching(/^The last 2 lines/),
    'The failure occurred.',
    expect.stringMatching(/^The first look\./),
    'Everstep detected the failure.',
    expect.stringMatching(/^The proof\./),
    'i-b was ready in place of i-a.',
    'Training had caught up.',
    expect.stringMatching(/^Note of ann/),
  ])
  expect(timeline.queryByText(/RanksHang/)).toBeNull()
  const pre = [...document.querySelectorAll('.moments pre')].map((each) => each.textContent)
  expect(pre[0]).toMatch(/ rank 0 {2}step 7\n.* rank 1 {2}waits$/)
  expect(pre.slice(1)).toEqual(['the first look', 'the proof'])
  expect(timeline.getByRole('link', { name: 'Open the log at this moment' }).getAttribute('href')).toBe(
    '/jobs/gpt/logs?failure=inc-1',
  )
})

test('similar incidents show what they share and how they ended', () => {
  page()
  const table = card('Similar incidents')
  expect(table.getByRole('link', { name: 'inc-0' }).getAttribute('href')).toBe('/incidents/inc-0')
  table.getByText('same instance, same fleet')
  table.getByText('Job failed')
})

test('a person acknowledges, takes the incident, adds a note and saves the post-mortem', async () => {
  const click = vi.spyOn(HTMLAnchorElement.prototype, 'click').mockImplementation(() => undefined)
  URL.createObjectURL = vi.fn(() => 'blob:x')
  URL.revokeObjectURL = vi.fn()
  const asked = served({
    '/v1/incidents/inc-1/acknowledge': { body: incident },
    '/v1/incidents/inc-1': { body: incident },
    '/v1/incidents/inc-1/notes': { body: { NoteId: 1 } },
    '/v1/incidents/inc-1/export': { body: { FileName: 'x.md', Content: '# Post-mortem', Format: 'markdown' } },
  })
  page()
  for (const name of ['Acknowledge', 'Export post-mortem']) fireEvent.click(screen.getByRole('button', { name }))
  fireEvent.click(screen.getByRole('button', { name: 'Change' }))
  fireEvent.change(screen.getByRole('textbox', { name: 'Owner' }), { target: { value: 'ann' } })
  fireEvent.click(screen.getByRole('button', { name: 'Save' }))
  expect(screen.getByRole('button', { name: 'Add note' })).toHaveProperty('disabled', true)
  fireEvent.change(screen.getByRole('textbox', { name: 'New note' }), { target: { value: ' the switch ' } })
  fireEvent.click(screen.getByRole('button', { name: 'Add note' }))
  await waitFor(() => expect(click).toHaveBeenCalled())
  const sent = asked.filter(({ method }) => method === 'POST').map(({ path, body }) => [path, body])
  expect(sent).toEqual([
    ['/v1/incidents/inc-1/acknowledge', {}],
    ['/v1/incidents/inc-1', { Owner: 'ann' }],
    [
      '/v1/incidents/inc-1/notes',
      { Text: 'the switch', ClientRequestToken: expect.stringMatching(/^[0-9a-f]{8,32}$/) },
    ],
  ])
  expect(asked.some(({ path }) => path.endsWith('/export'))).toBe(true)
  await waitFor(() => expect(screen.getByRole('textbox', { name: 'New note' })).toHaveProperty('value', ''))
})

test('a viewer changes nothing', () => {
  page({}, { role: 'viewer' })
  for (const name of ['Acknowledge', 'Change', 'Add note']) expect(screen.queryByRole('button', { name })).toBeNull()
  screen.getByRole('button', { name: 'Export post-mortem' })
})

test('a later job of the same name adds nothing to the page', () => {
  const later = { RunId: 'later', TrainingJobStatus: 'Failed', FailureReason: 'another story' }
  page({ Outcome: 'JobFailed' }, { job: { ...later, TrainingEndTime: incident.ClosedAt } })
  screen.getByText('Job failed', { selector: '.head .status' })
  expect(screen.queryByText(/another story/)).toBeNull()
})
