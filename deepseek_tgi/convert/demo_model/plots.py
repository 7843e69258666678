"""Plots of short stories. A plot is a way to ask for it and its beats; a beat is sentences of which one is taken.

Names in braces are filled from the cast: `N` the hero, `k` what the hero is, `a` the same with its adjective and
article, `F` and `fk` the friend, `o` and `ao` the thing, `p` the place, `w` the water, `food` something to eat. A beat
that begins with an empty sentence may be left out.
"""

from __future__ import annotations

from dataclasses import dataclass

Beat = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plot:
    """`asks` end the request "a story about {a} named {N} who ..."; `beats` follow the opening."""

    asks: tuple[str, ...]
    beats: tuple[Beat, ...]


OPENINGS: Beat = (
    "Once upon a time, there was {a} named {N}.",
    "Once upon a time, {a} named {N} lived in the {p}.",
    "{N} was {a} who lived near the {w}.",
    "There was once {a} called {N}.",
    "In a small house near the {p} lived {a} named {N}.",
    "{N} was {a}.",
    "Once there was {a} named {N}. {He} lived in a little house near the {w}.",
    "Long ago, {a} named {N} lived at the edge of the {p}.",
)
DAYS: Beat = (
    "One day",
    "One morning",
    "One sunny morning",
    "One afternoon",
    "One fine day",
    "One evening",
    "One cold morning",
    "One spring day",
    "On a windy day",
    "One Sunday",
)
ENDINGS: Beat = (
    "",
    "",
    "",
    "From that day on, {N} and {F} were the best of friends.",
    "{N} went to bed with a smile.",
    "It had been a wonderful day.",
    "{N} never forgot that day.",
    "And they all lived happily ever after.",
    "That night {N} slept very well.",
    "{N} was the happiest {k} in the whole {p}.",
    "When the sun went down, everyone went home.",
    "The end.",
)

PLOTS: tuple[Plot, ...] = (
    Plot(
        ("loses {ao}", "cannot find {ao}", "looks for {ao}"),
        (
            ("{N} had {ao}, and {he} loved it very much.", "{His} favorite thing was {ao}.", "{He} had {ao} that {his} grandmother had given to {him}."),
            ("{Day}, the {o} was gone.", "{Day}, {N} woke up and could not find the {o}.", "{Day}, {N} lost the {o} on the way home."),
            ("{N} looked under the bed and behind the door, but it was not there.", "{He} looked everywhere, but {he} could not find it.", "{He} began to cry.", "{N} was very sad and did not know what to do."),
            ("{His} friend {F}, {fa}, heard {him} and asked, \"What is wrong?\"", "Then {F} the {fk} came by. \"Why are you so sad?\" asked {F}.", "{He} went to {F} the {fk} and asked for help."),
            ("\"I have lost my {o},\" said {N}. \"Will you help me?\"", "\"My {o} is gone,\" said {N}. \"Do not worry,\" said {F}. \"We will find it together.\"", "{F} listened and said, \"Let us look for it together.\""),
            ("They walked through the {p} and looked behind every tree.", "They searched in the {p} until the sun was low.", "They asked everyone they met, but nobody had seen it.", "First they looked in the {p}, and then they went down to the {w}."),
            ("At last {F} saw something in the grass. It was the {o}!", "Then {N} saw something shine under a bush. There was the {o}!", "In the end they found the {o} near the {w}.", "Suddenly {F} called, \"Here it is!\" The {o} lay between two stones."),
            ("{N} was so happy that {he} danced.", "{N} thanked {F} and gave {fhim} some {food}.", "\"Thank you, {F}!\" said {N}. \"You are a true friend.\"", "{N} hugged {F} and laughed."),
        ),
    ),
    Plot(
        ("finds {ao}", "finds {ao} in the {p}", "sees {ao}"),
        (
            ("{Day}, {N} went for a walk in the {p}.", "{Day}, {he} was playing near the {w}.", "{Day}, {N} walked to the {p} to pick some flowers."),
            ("There {he} found {ao}.", "Under an old tree {he} saw {ao}.", "In the grass lay {ao}.", "Something was lying on the path. It was {ao}."),
            ("{N} picked it up and looked at it. \"Whose is this?\" {he} asked.", "\"How beautiful!\" said {N}. \"But it must belong to someone.\"", "{He} wanted to keep it, but {he} knew that somebody must be looking for it."),
            ("", "{He} asked the birds, but they did not know.", "First {he} asked an old farmer, but the farmer shook his head.", "{He} knocked on every door in the village."),
            ("Then {he} met {F}, {fa}, who was crying.", "On the way {he} met {F} the {fk}, who looked very sad.", "Near the {w} sat {F}, {fa}, with tears in {fhis} eyes."),
            ("\"I have lost my {o},\" said {F}. \"It was a present from my mother.\"", "\"Have you seen my {o}?\" asked {F}. \"I lost it this morning.\""),
            ("{N} smiled and held out the {o}. \"Here it is,\" {he} said.", "\"Is this yours?\" asked {N}, and {he} gave the {o} back.", "{N} gave the {o} to {F} at once."),
            ("{F} was so glad that {fhe} jumped up and down.", "{F} thanked {N} and shared {fhis} {food} with {him}.", "\"You are very kind,\" said {F}. \"Let us be friends.\"", "{F} laughed and invited {N} to tea."),
        ),
    ),
    Plot(
        ("wants {ao}", "dreams about {ao}", "saves money for {ao}"),
        (
            ("More than anything else, {N} wanted {ao}.", "{He} dreamed of {ao} every night.", "{Day}, {N} saw {ao} in the window of a shop, and {he} wanted it very much."),
            ("But the {o} cost a lot of money, and {N} had only one coin.", "But {he} had no money.", "\"It costs ten coins,\" said the shopkeeper. {N} had only two."),
            ("So {N} decided to work.", "\"Then I will work for it,\" said {N}.", "{F} the {fk} said, \"Why do you not earn the money?\" {N} thought that this was a good idea."),
            ("{He} carried wood for the baker and picked apples for the farmer.", "{He} swept the street, watered the flowers, and helped the old miller.", "Every day {he} helped {F} in the garden, and every day {he} got a coin.", "{He} washed windows and carried baskets to the market."),
            ("It was hard work, but {N} did not give up.", "In the evening {he} was tired, but {he} was also proud.", "After a few weeks {his} jar was full of coins."),
            ("At last {N} had enough money, and {he} ran to the shop.", "Then the great day came. {N} went to the shop and put the coins on the counter."),
            ("{He} carried the {o} home and showed it to {F}.", "{N} held the {o} in {his} hands and smiled.", "The shopkeeper smiled and gave {him} the {o}."),
            ("\"I worked for it myself,\" said {N} proudly.", "Now {N} knew that work makes a gift even better.", "{He} let {F} play with it too, because it is nice to share."),
        ),
    ),
    Plot(
        ("shares {ao} with a friend", "gives {ao} to a friend", "learns to share"),
        (
            ("{He} had {ao} and played with it every day.", "For {his} birthday {he} got {ao}.", "{N} had {ao}, and nobody else was allowed to touch it."),
            ("{Day}, {F} the {fk} asked, \"May I play with your {o}?\"", "{Day}, {F}, {fa}, came to visit. \"What a nice {o}!\" said {F}. \"May I hold it?\""),
            ("\"No,\" said {N}. \"It is mine.\"", "{N} shook {his} head and turned away."),
            ("{F} went home sadly, and {N} played alone.", "{F} said nothing and walked away."),
            ("But soon {N} was bored. It was not much fun to play alone.", "After a while {N} felt lonely. The {o} did not make {him} happy any more."),
            ("So {he} ran to {F} and said, \"I am sorry. Please come and play with me.\"", "\"I was not kind,\" thought {N}. {He} took the {o} and went to {F}'s house."),
            ("{F} smiled, and they played together until it was dark.", "They laughed and played all afternoon.", "{F} was happy and brought some {food} for both of them."),
            ("{N} had learned that sharing makes things better.", "\"It is much more fun with you,\" said {N}.", "After that, {N} always shared {his} things."),
        ),
    ),
    Plot(
        ("makes a new friend", "feels lonely", "meets a friend"),
        (
            ("{N} had no friends, and {he} often felt lonely.", "{He} had just moved to the {p} and did not know anyone.", "{N} was too shy to talk to the others."),
            ("{Day}, {he} sat alone by the {w} and looked at the water.", "{Day}, {he} heard a soft voice in the {p}.", "{Day}, {he} saw {fa} under a tree."),
            ("{Fa} came and sat down next to {him}. \"My name is {F},\" said the {fk}.", "There {he} met {F}, {fa}. {Fhe} looked lonely too.", "\"Hello,\" said the {fk}. \"I am {F}. What is your name?\""),
            ("\"I am {N},\" said {N} quietly.", "{N} took a deep breath and said, \"Hello. I am {N}.\""),
            ("\"Would you like to play with me?\" asked {F}.", "\"I know a good place for a picnic,\" said {F}. \"Come with me!\""),
            ("They threw stones into the {w} and counted the rings.", "They climbed a hill, picked berries, and told each other stories.", "They shared some {food} and talked until the evening."),
            ("When it got dark, {F} said, \"Will you come again tomorrow?\"", "\"I had a lovely day,\" said {N}. \"So did I,\" said {F}."),
            ("After that, {N} was never lonely again.", "Now {N} had a friend, and the whole world looked brighter."),
        ),
    ),
    Plot(
        ("is afraid of the dark", "cannot sleep", "is afraid at night"),
        (
            ("{N} was afraid of the dark.", "Every night, when the light went out, {N} was afraid.", "{He} did not like the night, because everything was so dark."),
            ("{Day}, {he} heard a strange sound outside {his} window.", "That night {he} saw a big shadow on the wall.", "One night the wind blew, and the old house creaked."),
            ("{N} pulled the blanket over {his} head.", "\"Who is there?\" {he} whispered.", "{His} heart beat very fast."),
            ("Then {his} mother came with a candle and sat down on the bed.", "Just then {F} the {fk} looked in. \"Do not be afraid,\" said {F}.", "{His} grandmother heard {him} and came into the room."),
            ("Together they looked out of the window. It was only a branch that moved in the wind.", "They opened the door, and a little cat walked in. It had made the noise.", "They looked at the wall. The shadow was only a coat on a chair."),
            ("{N} laughed. \"I was afraid of nothing at all!\" {he} said.", "\"You see,\" said the soft voice, \"the night is not dangerous.\""),
            ("Then they looked at the stars and counted them.", "The moon shone into the room and made everything silver.", "{N} listened to the owls and the crickets, and they sounded like music."),
            ("Soon {N} was fast asleep.", "After that, {N} was not afraid of the dark any more.", "{He} closed {his} eyes and slept until the morning."),
        ),
    ),
    Plot(
        ("gets caught in a storm", "walks home in the rain", "helps a friend in a storm"),
        (
            ("{Day}, {N} went to the {p} to pick berries.", "{Day}, {he} was on the way home from the {p}."),
            ("Suddenly the sky turned dark, and it began to rain.", "Then the wind grew strong, and heavy rain fell from the clouds.", "There was a flash of light, and the thunder rolled."),
            ("{N} ran as fast as {he} could.", "{He} was soon wet from head to toe.", "{He} looked for a dry place, but there was none."),
            ("Under a bush {he} heard a small voice. It was {F}, {fa}, who was lost.", "Near the {w} {he} found {F} the {fk}, who was shaking with cold."),
            ("\"Come with me,\" said {N}. \"We will find a dry place together.\"", "{N} took {F} by the hand and did not let go.", "{N} put {his} coat around {F}."),
            ("They found a little cave and waited until the storm was over.", "An old barn stood at the edge of the field, and they crept inside.", "They saw a light. It was the house of a kind old woman, and she let them in."),
            ("They ate some {food} and listened to the rain.", "They sat close together and told each other stories.", "There they had hot soup and dried their clothes by the fire."),
            ("When the sun came out again, there was a rainbow over the {p}.", "In the evening the sky was clear, and {N} took {F} home."),
        ),
    ),
    Plot(
        ("learns to swim", "learns something new", "learns to be patient"),
        (
            ("All {his} friends could swim, but {N} could not.", "{N} wanted to learn to swim, but {he} was afraid of the water.", "Every summer the others swam in the {w}, and {N} only watched."),
            ("{Day}, {F} the {fk} said, \"I will teach you.\"", "{Day}, {he} asked {F}, {fa}, for help."),
            ("On the first day {N} only put {his} feet into the water.", "At first {N} swallowed a lot of water and wanted to go home."),
            ("\"Do not give up,\" said {F}. \"Nobody learns it in one day.\"", "\"Be patient,\" said {F}. \"Try it once more.\""),
            ("Every morning they went to the {w} and practiced.", "They practiced every day, in the sun and in the rain."),
            ("After a week {N} could float. After two weeks {he} could swim a little.", "Slowly {N} became better and better."),
            ("{Day2}, {N} swam all the way across the {w}.", "At the end of the summer {N} swam like a fish."),
            ("{F} clapped and cheered.", "\"I did it!\" called {N}. {F} was very proud.", "\"Thank you for your patience,\" said {N}."),
        ),
    ),
    Plot(
        ("plants a seed", "grows a big pumpkin", "works in the garden"),
        (
            ("{Day}, {N} and {F} the {fk} found a small seed.", "{Day}, {F} the {fk} gave {him} a small seed.", "In spring, {N} and {F}, {fa}, bought a little seed at the market."),
            ("{He} put it into the ground and gave it some water.", "{He} dug a hole in the garden and laid the seed into it."),
            ("Every day {he} looked at the ground, but nothing happened.", "{He} waited and waited, but there was nothing to see."),
            ("\"Be patient,\" said {F}. \"A plant needs time.\"", "{F} laughed and said, \"A seed sleeps before it wakes up.\""),
            ("Then, one morning, a tiny green leaf came out of the ground.", "After ten days {N} saw the first green leaf."),
            ("{N} watered it every day and pulled out the weeds.", "The sun shone, the rain fell, and the plant grew taller and taller."),
            ("In autumn there was a huge orange pumpkin in the garden.", "By the end of the summer a big pumpkin lay in the garden. It was as large as a chair."),
            ("{N} and {F} made soup from it, and there was enough for everyone.", "They invited the whole village to eat pumpkin pie.", "{N} kept the seeds for the next spring."),
        ),
    ),
    Plot(
        ("gets lost", "gets lost in the {p}", "cannot find the way home"),
        (
            ("{Day}, {N} followed a butterfly into the {p}.", "{Day}, {he} walked farther than ever before.", "{Day}, {N} went to look for mushrooms in the {p}."),
            ("When {he} looked around, {he} did not know where {he} was.", "Soon {he} could not see the path any more."),
            ("{N} called for help, but nobody answered.", "It was getting dark, and {N} was afraid.", "{He} sat down on a stone and began to cry."),
            ("Then {F}, {fa}, came out from behind a tree.", "After a while {he} met {F} the {fk}.", "\"Are you lost?\" asked a friendly voice. It was {F}, {fa}."),
            ("\"I cannot find my way home,\" said {N}.", "\"I am lost,\" said {N}. \"I want to go home.\""),
            ("\"Follow me,\" said {F}. \"I know every path here.\"", "\"We must follow the {w},\" said {F}. \"It leads to your house.\""),
            ("They walked side by side and sang a song so that they would not be afraid.", "They walked under the stars until they saw a light."),
            ("At last {N} saw {his} own house, and {his} mother stood at the door.", "Soon {N} was at home, and {his} father hugged {him}."),
            ("{F} stayed for supper, and they ate {food}.", "\"Thank you, {F},\" said {N}. \"I will never go so far alone again.\""),
        ),
    ),
    Plot(
        ("has a birthday", "plans a party", "gets a surprise"),
        (
            ("It was {N}'s birthday, but nobody seemed to remember it.", "{N} woke up early, because it was {his} birthday."),
            ("{He} went to see {F} the {fk}, but {F} was not at home.", "{F} only said, \"Good morning,\" and walked on."),
            ("{N} was sad. \"Everyone has forgotten me,\" {he} thought.", "{He} walked slowly through the {p} and kicked a stone."),
            ("In the evening {he} came home and opened the door.", "When it got dark, {he} went home."),
            ("\"Surprise!\" called all {his} friends.", "Suddenly all the lamps went on, and everybody sang for {him}."),
            ("There was a big cake with candles on the table.", "The room was full of balloons, and there was a cake with strawberries."),
            ("{F} gave {him} {ao}.", "\"This is for you,\" said {F}, and {fhe} gave {him} {ao}."),
            ("They danced and ate {food} until late at night.", "{N} blew out the candles and made a wish."),
            ("\"This is the best birthday of my life,\" said {N}.", "{N} was so happy that {he} could hardly speak."),
        ),
    ),
    Plot(
        ("fixes {ao}", "breaks {ao}", "tells the truth"),
        (
            ("{Day}, {N} was playing in the house of {F} the {fk}.", "{Day}, {N} visited {F}, {fa}."),
            ("On the shelf stood {ao}. {N} wanted to look at it, but it fell down and broke.", "{F} had {ao}. {N} dropped it by accident, and it broke."),
            ("{N} was afraid. \"What will {F} say?\" {he} thought.", "Nobody had seen it. {N} could just run away."),
            ("But {N} did not run away. \"I have broken your {o},\" {he} said. \"I am very sorry.\"", "Then {he} took a deep breath and told {F} the truth."),
            ("{F} looked sad for a moment. Then {fhe} smiled.", "{F} was quiet for a while."),
            ("\"Thank you for telling me,\" said {F}. \"Let us fix it together.\"", "\"Everyone breaks something now and then,\" said {F}. \"Maybe we can fix it.\""),
            ("They found some glue and a piece of string and worked all afternoon.", "{N} held the pieces, and {F} put them together."),
            ("In the end the {o} looked almost like new.", "The {o} was not perfect, but both of them liked it even more."),
            ("{N} was glad that {he} had told the truth.", "\"A friend who tells the truth is worth more than any {o},\" said {F}."),
        ),
    ),
    Plot(
        ("helps a sick friend", "is kind to everyone", "takes care of a friend"),
        (
            ("{Day}, {N} wanted to play with {F} the {fk}.", "{Day}, {N} went to visit {F}, {fa}."),
            ("But {F} was sick and lay in bed.", "But {F} did not come to the door. {Fhe} had a bad cold."),
            ("\"I will take care of you,\" said {N}.", "{N} ran home as fast as {he} could."),
            ("{He} cooked some soup and made a pot of hot tea with honey.", "{He} picked some flowers and put them next to the bed.", "{He} brought {food} and a warm blanket."),
            ("Then {he} read a funny story aloud.", "In the afternoon {he} told {F} about everything that had happened in the {p}."),
            ("{F} laughed and felt a little better.", "{F} ate the soup and fell asleep."),
            ("After three days {F} was well again.", "The next week {F} could play outside again."),
            ("\"You are the best doctor in the world,\" said {F}.", "\"When you are sick, I will take care of you too,\" said {F}."),
        ),
    ),
    Plot(
        ("plays in the snow", "builds a snowman", "sees snow for the first time"),
        (
            ("One winter morning {N} looked out of the window. Everything was white.", "In the night it had snowed, and the whole {p} was white and quiet."),
            ("{He} put on {his} warm scarf and ran outside.", "\"Snow!\" called {N}. {He} had waited for it for so long."),
            ("There {he} met {F} the {fk}.", "{F}, {fa}, was already there and threw a snowball."),
            ("Together they rolled three big balls of snow.", "They decided to build a snowman."),
            ("They gave the snowman a carrot for a nose and two stones for eyes.", "{N} found a carrot for the nose, and {F} found an old hat."),
            ("\"He looks cold,\" said {N}, and {he} gave the snowman {his} scarf.", "\"What shall we call him?\" asked {F}. \"Mr. White,\" said {N}."),
            ("Then they slid down the hill until their feet were cold.", "In the evening they drank hot chocolate by the fire."),
            ("When spring came, the snowman melted, but they knew that he would come back.", "Through the window they saw the snowman in the moonlight, and it seemed to smile."),
        ),
    ),
    Plot(
        ("wins a race", "takes part in a race", "is slow but never gives up"),
        (
            ("{Day}, there was a big race in the {p}.", "Every year there was a race from the {p} to the {w}."),
            ("{N} wanted to take part, but the others laughed. \"You are too slow,\" they said.", "{F} the {fk} was the fastest of all. \"I will surely win,\" said {F}."),
            ("{N} did not listen and trained every morning.", "\"I will do my best,\" said {N}."),
            ("When the race began, {F} was soon far ahead.", "On the day of the race everyone ran as fast as they could."),
            ("But then {F} fell over a root and hurt {fhis} foot.", "Halfway there, {F} slipped and fell into a hole."),
            ("{N} stopped and helped {F} to get up.", "{N} could have run past, but {he} stopped and asked, \"Are you hurt?\""),
            ("They walked to the end side by side, and everybody clapped.", "Arm in arm they crossed the line together. They were the last, but the others cheered."),
            ("\"You did not win the race,\" said {F}, \"but you won a friend.\"", "{N} got a prize for being kind."),
        ),
    ),
    Plot(
        ("finds a treasure map", "looks for a treasure", "goes on an adventure"),
        (
            ("{Day}, {N} found an old map in the attic.", "{Day}, {N} found a bottle in the {w}. There was a map inside."),
            ("A red cross was drawn in the middle of it. \"A treasure!\" called {N}.", "The map showed the {p}, and under an old tree there was a red cross."),
            ("{He} ran to {F} the {fk} and showed {fhim} the map.", "{He} asked {F}, {fa}, to come along."),
            ("They packed some {food} and a lamp and set out.", "The next morning they started very early."),
            ("They crossed the {w}, climbed a hill, and went through the {p}.", "The way was long, and more than once they almost turned back."),
            ("At last they came to the tree and began to dig.", "Under the tree they dug a deep hole."),
            ("They found a wooden box. Inside it lay {ao} and a letter.", "There was a small chest, and in it they found {ao}."),
            ("\"The real treasure is a good friend,\" said the letter.", "They laughed, because the best part had been the adventure.", "They carried the treasure home and told everyone about it."),
        ),
    ),
    Plot(
        ("has a quarrel with a friend", "says sorry", "learns to forgive"),
        (
            ("{N} and {F} the {fk} were good friends.", "{N} had a good friend, {F} the {fk}."),
            ("{Day}, both of them wanted to play with the {o}.", "{Day}, they had a quarrel about {ao}."),
            ("\"I had it first!\" said {N}. \"No, I did!\" said {F}.", "They shouted at each other, and each went home alone."),
            ("The next day {N} sat by the {w} and felt bad.", "In the evening {N} could not eat, because {he} missed {F}."),
            ("\"Why did I shout?\" {he} thought. \"{F} is my best friend.\"", "\"A quarrel is like a stone in a shoe,\" said {his} grandmother. \"You must take it out.\""),
            ("{He} went to {F}'s house and knocked on the door.", "{He} took some {food} and went to {F}."),
            ("\"I am sorry,\" said {N}. \"I am sorry too,\" said {F}.", "Both of them said \"I am sorry\" at the same time, and then they laughed."),
            ("Then they played together, and nobody asked who was first.", "They shook hands and promised never to quarrel about such a small thing again."),
        ),
    ),
)  # fmt: skip
